"""Training-time test: K draft steps unrolled.

Row t stands at token t. At step k it reads the embedding of x[t+1+k] and predicts x[t+2+k]; it is counted if
loss_mask[t+1] ... loss_mask[t+2+k] are all true, in one document. What is easy to get wrong: rows that are not counted
still give their step-0 key and value, and need nothing else.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from eagle3.config import UserError
from eagle3.draft.attention import Places, draft_attention
from eagle3.draft.context_attention import Documents, wants_all_queries
from eagle3.draft.fusion import TakeRows, TokenHeads
from eagle3.draft.layer import Rotation, embeds_heads, finish, layer_weights, project
from eagle3.draft.model import Eagle3Drafter
from eagle3.features.record import FeatureSample, supervised_rows

ROWS_PER_CHUNK = 1024  # rows whose (rows, W) logits exist at one time where only their argmax is wanted


@dataclass(frozen=True)
class Share:
    """What a pack has of a long document whose rows are split: pieces of it, each a document of the pack.

    Rows are independent from the second draft step on, so that only the step-0 keys and values of the other pieces are
    needed.
    """

    num_rows: tuple[int, ...]  # of each piece, its first tokens, whose rows are this pack's; those behind are only read
    key_lengths: tuple[int, ...]  # of each piece: the document's tokens up to its end, which it attends to
    # (T, ...) of the pack's tokens -> (sum of key_lengths, ...), with every pack's part in it; differentiable
    gather: Callable[[Tensor], Tensor]


@dataclass(frozen=True)
class PackedSequences:
    """Documents one after another on one token axis, without padding."""

    input_ids: Tensor  # (T,) int64
    positions: Tensor  # (T,) int64, from 0 in each document that is whole
    loss_mask: Tensor  # (T,) bool; on the CPU, where rows are counted: no step waits for a device to learn its size
    document_lengths: tuple[int, ...]  # tokens, adding up to T
    aux_hidden_states: Tensor  # (T, A*D)
    target_rows: Tensor  # (S,) int64, ascending: tokens whose last hidden state is here; on the CPU like the mask
    last_hidden_states: Tensor  # (S, D) after the target's final norm
    target_logz: Tensor | None  # (S,) fp32
    sample_ids: tuple[str, ...]  # one per document
    share: Share | None = None  # null: the documents are whole
    embeds: Tensor | None = None  # (T, D) the tokens' embeddings; null: they are looked up where they are needed

    def to(self, device: torch.device | str) -> "PackedSequences":
        """Copies the tensors to a device, but for those that stay on the CPU."""
        # Where the memory is pinned, the copies are not waited for.
        return replace(
            self,
            input_ids=self.input_ids.to(device, non_blocking=True),
            positions=self.positions.to(device, non_blocking=True),
            aux_hidden_states=self.aux_hidden_states.to(device, non_blocking=True),
            last_hidden_states=self.last_hidden_states.to(device, non_blocking=True),
            target_logz=None if self.target_logz is None else self.target_logz.to(device, non_blocking=True),
            embeds=None if self.embeds is None else self.embeds.to(device, non_blocking=True),
        )

    def steps_per_row(self, ttt_steps: int) -> Tensor:  # (T,) int64, on the CPU
        """Returns at how many of the K steps each row is counted: always the first ones."""
        num_tokens = self.loss_mask.numel()
        # A chain from an earlier row ends before a token that is not supervised or starts a document.
        lengths = torch.tensor(self.document_lengths, dtype=torch.int64)
        ends_chain = (~self.loss_mask).index_fill(0, lengths.cumsum(0) - lengths, True)
        tokens = torch.arange(num_tokens + 1)
        stops = torch.cat([torch.where(ends_chain, tokens[:-1], num_tokens), tokens[-1:]])
        next_stop = stops.flip(0).cummin(0).values.flip(0)  # (T + 1,) at or after each token
        # Of the supervised tokens t+1, t+2, ... the first is not drafted: prefill gives it, or the round before.
        num_steps = (next_stop[1:] - tokens[1:] - 1).clamp(0, ttt_steps)
        if self.share is not None:
            starts = (lengths.cumsum(0) - lengths).repeat_interleave(lengths)  # (T,) of each token's piece
            own = tokens[:-1] - starts < torch.tensor(self.share.num_rows).repeat_interleave(lengths)
            num_steps = torch.where(own, num_steps, 0)
        return num_steps

    def counted(self, ttt_steps: int) -> list[Tensor]:
        """Returns, for each of the K steps, the tokens (R_k,) whose row is counted there, ascending, on the CPU."""
        num_steps = self.steps_per_row(ttt_steps)
        return [(num_steps > step).nonzero().flatten() for step in range(ttt_steps)]


@dataclass(frozen=True)
class DraftStep:
    """One step of the unrolled drafter, at the rows that are counted there."""

    rows: Tensor  # (R_k,) int64 tokens, ascending
    hidden: Tensor  # (R_k, D) the layer's output before the final norm
    normed: Tensor  # (R_k, D) and after it


@dataclass(frozen=True)
class ChainMatches:
    """Where the drafter's first choices are the recorded tokens."""

    rows: Tensor  # (R,) int64 tokens counted at step 0, ascending
    matches: Tensor  # (R, K) whether, or how probably, the choice of step k at row t is x[t+2+k]; 0 where not counted


def pack(samples: list[FeatureSample], *, pin: bool = False) -> PackedSequences:
    """Joins samples, in the order given; of none it makes a pack of no tokens.

    With `pin` the states, which are most of it, come in memory that a GPU can copy from.

    Raises:
        UserError: a sample lacks the last hidden state of a supervised token.
    """
    for sample in samples:
        check_last_rows(sample.sample_id, sample.loss_mask, sample.last_rows)
    lengths = [sample.input_ids.numel() for sample in samples]
    starts = [sum(lengths[:index]) for index in range(len(lengths))]
    logz = [sample.target_logz for sample in samples if sample.target_logz is not None]
    none = torch.zeros(0, dtype=torch.int64)
    return PackedSequences(
        input_ids=torch.cat([none, *(sample.input_ids.long() for sample in samples)]),
        positions=torch.cat([none, *(torch.arange(length) for length in lengths)]),
        loss_mask=torch.cat([none.bool(), *(sample.loss_mask for sample in samples)]),
        document_lengths=tuple(lengths),
        aux_hidden_states=_cat_states([sample.aux_hidden_states for sample in samples], pin=pin),
        target_rows=torch.cat(
            [none, *(sample.last_rows.long() + start for sample, start in zip(samples, starts, strict=True))]
        ),
        last_hidden_states=_cat_states([sample.last_hidden_states for sample in samples], pin=pin),
        target_logz=torch.cat(logz) if logz and len(logz) == len(samples) else None,
        sample_ids=tuple(sample.sample_id for sample in samples),
    )


def check_last_rows(sample_id: str, loss_mask: Tensor, last_rows: Tensor) -> None:  # (T,), (R,)
    """Compares the rows that have a last hidden state with those that the losses read.

    Raises:
        UserError: there are too few.
    """
    needed = supervised_rows(loss_mask)
    missing = needed[~torch.isin(needed, last_rows)]
    if missing.numel():
        raise UserError(
            f"last_rows must hold the row before every supervised token, got none for row {int(missing[0])} and "
            f"{missing.numel() - 1} more (sample {sample_id!r}); capture the sample again"
        )


class Chains:
    """The draft steps of a pack, one after another; which rows go on is told at each.

    T_q tokens can attend: each document's from its first counted row on, for a prompt's queries are of no use.
    """

    context: Tensor  # (T', 2 n_kv, d) step-0 keys and values, after the first step; T' is T if documents are whole
    _embeds: Tensor  # (T, n_q + 2 n_kv, d) what each token's embedding gives to the rows that read it
    _hidden: Tensor  # (R_(k-1), D) what the step before hands on
    _places: Places  # of the step before, among the T_q tokens

    def __init__(
        self,
        drafter: Eagle3Drafter,
        embed_tokens: Tensor,  # (V, D) the target's, frozen
        packed: PackedSequences,
        ttt_steps: int,
        *,
        num_recomputed: int = 0,  # of the first steps, whose gate and up are made again in the backward
    ) -> None:
        self._drafter = drafter
        self._embed_tokens = embed_tokens
        self._packed = packed
        self._num_links = ttt_steps - 1
        self._num_recomputed = num_recomputed
        self._step = 0
        self._chain: Tensor | None = None  # (K - 1, T_q, 2 n_kv, d) own keys and values of later steps
        self._weights = layer_weights(drafter)
        key_lengths = packed.document_lengths if packed.share is None else packed.share.key_lengths
        self._tables = drafter.rope_tables(max(key_lengths, default=0) + ttt_steps)
        device = packed.input_ids.device
        first_rows = _first_rows(packed)
        lengths = torch.tensor(packed.document_lengths, dtype=torch.int64)
        query_lengths = tuple((lengths - first_rows).tolist())
        first_tokens = first_rows + lengths.cumsum(0) - lengths
        attends = torch.arange(int(lengths.sum())) >= first_tokens.repeat_interleave(lengths)
        self._place_of_token = (attends.cumsum(0) - 1).to(device)  # (T,), of tokens that attend
        self._documents = Documents.of(query_lengths, device, key_lengths)

    def advance(self, rows: Tensor) -> DraftStep:  # (R_k,) tokens, ascending, of those of the step before
        """Runs the next draft step on recorded tokens."""
        if rows.numel() == 0:
            nothing = self._embed_tokens.new_zeros(
                0, self._drafter.config.hidden_size, dtype=self._drafter.compute_dtype()
            )
            return DraftStep(rows=rows, hidden=nothing, normed=nothing)
        at = self._place_of_token[rows]  # (R_k,)
        places = Places(at, _inverse(at, sum(self._documents.lengths)), self._documents)
        projected, residual = self._first(rows) if self._step == 0 else self._next(rows, places)
        attended, self._chain = draft_attention(projected, self.context, self._chain, self._step, places)
        output, normed = finish(residual, attended, self._weights, recompute=self._step < self._num_recomputed)
        self._hidden = normed if self._drafter.config.norm_output else output
        self._places = places
        self._step += 1
        return DraftStep(rows=rows, hidden=output, normed=normed)

    def _first(self, rows: Tensor) -> tuple[Tensor, Tensor]:  # queries (R_0, n_q, d), residual (R_0, D)
        """Makes the keys and values of all tokens, and queries of the rows."""
        config, positions, weights = self._drafter.config, self._packed.positions, self._weights
        table, token_ids = self._embed_tokens, self._packed.input_ids
        if self._packed.embeds is not None:
            table, token_ids = self._packed.embeds, torch.arange(token_ids.numel(), device=token_ids.device)
        self._embeds = embeds_heads(table, token_ids, weights, config.head_dim)
        hidden = self._drafter.fuse(self._packed.aux_hidden_states)  # (T, D)
        num_queries, num_keys = config.num_attention_heads, config.num_key_value_heads
        next_tokens = _next_tokens(self._packed)
        context, _ = self._project(next_tokens, hidden, weights.key_value, positions, num_queries, num_keys)
        self.context = context if self._packed.share is None else self._packed.share.gather(context)
        hidden = TakeRows.apply(hidden, rows, _inverse(rows, hidden.shape[0]))  # (R_0, D)
        return self._project(rows + 1, hidden, weights.query, positions[rows], 0, num_queries)

    def _next(self, rows: Tensor, places: Places) -> tuple[Tensor, Tensor]:  # (R_k, n_q + 2 n_kv, d), residual (R_k, D)
        """Makes queries, keys and values of the rows that go on, from what they put out."""
        config, before = self._drafter.config, self._places
        if self._step == 1:
            num_places = places.row_of_token.numel()
            self._chain = self.context.new_empty(self._num_links, num_places, *self.context.shape[1:])
        hidden = self._hidden
        if rows.numel() < before.rows.numel():
            hidden = TakeRows.apply(hidden, before.row_of_token[places.rows], places.row_of_token[before.rows])
        tokens = rows + 1 + self._step
        positions = self._packed.positions[rows] + self._step
        num_rotated = config.num_attention_heads + config.num_key_value_heads
        return self._project(tokens, hidden, self._weights.query_key_value, positions, 0, num_rotated)

    def _project(
        self,
        tokens: Tensor,  # (N,) that each row reads, -1 for none
        hidden: Tensor,  # (N, D)
        matrix: Tensor,  # (n d, D)
        positions: Tensor,  # (N,)
        first_head: int,
        num_rotated: int,
    ) -> tuple[Tensor, Tensor]:  # heads (N, n, d), residual (N, D)
        rotation = Rotation(positions, self._tables, num_rotated, self._drafter.config.head_dim)
        added = TokenHeads(self._embeds, tokens, first_head)
        heads, residual, self._embeds = project(added, hidden, self._weights, matrix, rotation)
        return heads, residual


def unroll(
    drafter: Eagle3Drafter,
    embed_tokens: Tensor,  # (V, D) the target's, frozen
    packed: PackedSequences,
    ttt_steps: int,
    *,
    num_recomputed: int = 0,
) -> Iterator[DraftStep]:
    """Runs the K draft steps on recorded tokens, each at the rows that are counted there.

    The later steps read the recorded token, not the drafter's choice: a served chain goes on only where the two agree.
    """
    counted = packed.counted(ttt_steps)
    # One copy, before there is work that it would wait for.
    on_device = torch.cat(counted).to(packed.input_ids.device).split([rows.numel() for rows in counted])
    chains = Chains(drafter, embed_tokens, packed, ttt_steps, num_recomputed=num_recomputed)
    yield from (chains.advance(rows) for rows in on_device)


@torch.no_grad()
def chain_matches(
    drafter: Eagle3Drafter,
    embed_tokens: Tensor,  # (V, D)
    packed: PackedSequences,
    ttt_steps: int,
) -> ChainMatches:
    """Compares the drafter's first choice at every row and step with the recorded token."""
    target_ids = drafter.target_ids
    rows = packed.counted(ttt_steps)[0].to(packed.input_ids.device)
    matches = torch.zeros(rows.numel(), ttt_steps, dtype=torch.bool, device=rows.device)
    for index, step in enumerate(unroll(drafter, embed_tokens, packed, ttt_steps)):
        for some_rows, normed in zip(step.rows.split(ROWS_PER_CHUNK), step.normed.split(ROWS_PER_CHUNK), strict=True):
            drafted = target_ids[drafter.lm_head(normed).argmax(-1)]  # (R_chunk,)
            matches[torch.searchsorted(rows, some_rows), index] = drafted == packed.input_ids[some_rows + 2 + index]
    return ChainMatches(rows=rows, matches=matches)


def _first_rows(packed: PackedSequences) -> Tensor:  # (documents,)
    """Returns the place in each document of the first token that attends: its first counted row, or its last token."""
    lengths = torch.tensor(packed.document_lengths, dtype=torch.int64)
    if wants_all_queries(packed.document_lengths, packed.input_ids.device):
        return torch.zeros_like(lengths)
    ends = lengths.cumsum(0)
    starts = ends - lengths
    rows = torch.cat([packed.counted(1)[0], ends[-1:]])  # the end, so that there is always a next one
    following = rows[torch.searchsorted(rows, starts)]
    return torch.minimum(following, ends - 1) - starts


def _inverse(index: Tensor, size: int) -> Tensor:  # (N,) -> (size,)
    """Returns where in the index each number below `size` is, -1 where it is not."""
    inverse = torch.full((size,), -1, dtype=index.dtype, device=index.device)
    inverse[index] = torch.arange(index.numel(), device=index.device)
    return inverse


def _next_tokens(packed: PackedSequences) -> Tensor:  # (T,)
    """Returns each token's successor.

    A document's last token has none and gets -1; no counted row attends to it.
    """
    has_next = packed.positions.roll(-1) > packed.positions
    return torch.where(has_next, torch.arange(1, has_next.numel() + 1, device=has_next.device), -1)


def _cat_states(states: list[Tensor], *, pin: bool) -> Tensor:  # (N_i, W) -> (sum of N_i, W)
    if not states:
        return torch.zeros(0, 0)
    shape = (sum(each.shape[0] for each in states), states[0].shape[1])
    return torch.cat(states, out=torch.empty(shape, dtype=states[0].dtype, device=states[0].device, pin_memory=pin))
