"""One long document over several ranks: each takes some of its rows, and sees the keys of all.

Rows are independent from the second draft step on, so one all-gather of the step-0 keys and values, and a
reduce-scatter of their gradients, is exact. Every rank has two pieces, one from each end: a late row sees more keys
than an early one. Pieces are cut by counted rows, which cost the most, and each has one at least: without one a rank
would make its gradients in another order than the others, which ZeRO-2 takes for the same.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable

from eagle3.draft.ttt import Share
from eagle3.features.codec import CodedStates
from eagle3.training.packs import CodedPack

PIECES_PER_RANK = 2


@dataclass(frozen=True)
class Ranks:
    """The ranks that share documents."""

    rank: int
    size: int
    group: dist.ProcessGroup | None  # of their own, so that nothing else comes between their collectives

    @classmethod
    def of(cls, rank: int, size: int) -> "Ranks":
        """Makes the group; every rank must call it."""
        return cls(rank, size, dist.new_group() if size > 1 else None)

    def can_split(self, num_counted: int) -> bool:
        """Tells whether a document with so many rows counted at step 0 gives every piece one."""
        return self.size > 1 and num_counted >= PIECES_PER_RANK * self.size


@dataclass(frozen=True)
class Cuts:
    """Where a document of T tokens is cut; the same on every rank."""

    bounds: tuple[int, ...]  # of the pieces: 0, ..., T
    size: int  # ranks

    def pieces(self, rank: int) -> list[int]:
        """Returns the numbers of a rank's pieces: one from each end."""
        return [rank, len(self.bounds) - 2 - rank]

    def tokens(self, rank: int) -> Tensor:  # (P,) int64, ascending
        """Returns the tokens whose keys and values a rank makes."""
        return torch.cat([torch.arange(self.bounds[i], self.bounds[i + 1]) for i in self.pieces(rank)])

    @property
    def width(self) -> int:
        """The tokens of the rank with the most, as many as each sends."""
        return max(self.tokens(rank).numel() for rank in range(self.size))


def cut(counted: Tensor, num_tokens: int, size: int) -> Cuts:  # counted (R_0,) tokens, ascending
    """Cuts a document into pieces with as many counted rows each."""
    num_pieces = PIECES_PER_RANK * size
    assert counted.numel() >= num_pieces, (counted.numel(), num_pieces)
    inner = [int(counted[index * counted.numel() // num_pieces]) for index in range(1, num_pieces)]
    return Cuts((0, *inner, num_tokens), size)


def share_of(whole: CodedPack, ranks: Ranks, ttt_steps: int) -> CodedPack:
    """Returns a rank's share of a pack of one document."""
    tokens, num_tokens = whole.tokens, whole.tokens.loss_mask.numel()
    assert len(tokens.document_lengths) == 1, tokens.document_lengths
    cuts = cut(tokens.counted(1)[0], num_tokens, ranks.size)
    mine = cuts.pieces(ranks.rank)
    begins, ends = [cuts.bounds[i] for i in mine], [cuts.bounds[i + 1] for i in mine]
    # The last row of a piece reads K tokens behind it, and predicts one more.
    reaches = [min(end + ttt_steps + 1, num_tokens) for end in ends]
    kept = torch.cat([torch.arange(begin, reach) for begin, reach in zip(begins, reaches, strict=True)])
    lengths = tuple(reach - begin for begin, reach in zip(begins, reaches, strict=True))
    num_rows = tuple(end - begin for begin, end in zip(begins, ends, strict=True))

    wanted = torch.isin(kept, tokens.target_rows)
    last = torch.searchsorted(tokens.target_rows, kept[wanted])
    share = Share(num_rows, tuple(reaches), _Gather(cuts, ranks, lengths, num_rows, tuple(reaches)))
    part = replace(
        tokens,
        input_ids=_rows(tokens.input_ids, kept),
        positions=_rows(tokens.positions, kept),
        loss_mask=tokens.loss_mask[kept],
        document_lengths=lengths,
        target_rows=wanted.nonzero().flatten(),
        target_logz=None if tokens.target_logz is None else _rows(tokens.target_logz, last),
        sample_ids=tokens.sample_ids * len(lengths),
        share=share,
        embeds=None if tokens.embeds is None else _rows(tokens.embeds, kept),
    )
    return replace(whole, tokens=part, aux=_state_rows(whole.aux, kept), last=_state_rows(whole.last, last))


class _Gather:
    """Brings together what ranks have of a document's tokens."""

    def __init__(
        self, cuts: Cuts, ranks: Ranks, lengths: Sequence[int], num_rows: Sequence[int], key_lengths: tuple[int, ...]
    ) -> None:
        self.ranks, self.key_lengths, self.width = ranks, key_lengths, cuts.width
        starts = [sum(lengths[:index]) for index in range(len(lengths))]
        # (P,) this rank's own tokens, on its pack's axis.
        self.own = torch.cat([torch.arange(start, start + n) for start, n in zip(starts, num_rows, strict=True)])
        # (T,) where each token of the document comes to lie, rank after rank.
        self.places = torch.empty(cuts.bounds[-1], dtype=torch.int64)
        for rank in range(cuts.size):
            tokens = cuts.tokens(rank)
            self.places[tokens] = rank * self.width + torch.arange(tokens.numel())

    def __call__(self, mine: Tensor) -> Tensor:  # (T of the pack, ...) -> (sum of key_lengths, ...)
        gathered: Tensor = _AllGather.apply(mine, self)
        return gathered


class _AllGather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, mine: Tensor, gather: _Gather) -> Tensor:  # torch leaves ctx untyped
        ctx.gather, ctx.shape = gather, mine.shape
        own = gather.own.to(mine.device)
        sent = mine.new_zeros(gather.width, *mine.shape[1:])
        sent[: own.numel()] = mine[own]
        received = mine.new_empty(gather.ranks.size * gather.width, *mine.shape[1:])
        dist.all_gather_into_tensor(received, sent, group=gather.ranks.group)
        document = received[gather.places.to(mine.device)]  # (T, ...)
        return torch.cat([document[:length] for length in gather.key_lengths])

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, None]:
        gather: _Gather = ctx.gather
        # Sums over pieces and ranks, in fp32 as the attention kernels sum over rows.
        wide = torch.promote_types(grad.dtype, torch.float32)
        document = grad.new_zeros(gather.places.numel(), *grad.shape[1:], dtype=wide)
        for length, part in zip(gather.key_lengths, grad.split(gather.key_lengths), strict=True):
            document[:length] += part
        sent = document.new_zeros(gather.ranks.size * gather.width, *grad.shape[1:])
        sent[gather.places.to(grad.device)] = document
        received = document.new_empty(gather.width, *grad.shape[1:])
        dist.reduce_scatter_tensor(received, sent, group=gather.ranks.group)
        own = gather.own.to(grad.device)
        grad_mine = grad.new_zeros(ctx.shape)
        grad_mine[own] = received[: own.numel()].to(grad.dtype)
        return grad_mine, None


def _rows(tensor: Tensor, index: Tensor) -> Tensor:
    """Takes rows, into pinned memory where they come from there."""
    taken = torch.empty(index.numel(), *tensor.shape[1:], dtype=tensor.dtype, pin_memory=tensor.is_pinned())
    return torch.index_select(tensor, 0, index, out=taken)


def _state_rows(states: CodedStates, index: Tensor) -> CodedStates:
    beside = (states.scales, states.outlier_columns, states.outliers)
    return CodedStates(_rows(states.codes, index), *(None if one is None else _rows(one, index) for one in beside))
