"""Training-time test: K draft steps unrolled.

Row t stands at token t. At step k it reads the embedding of x[t+1+k] and predicts x[t+2+k]; it is counted if
loss_mask[t+1] ... loss_mask[t+2+k] are all true, in one document. What is easy to get wrong: rows that are not counted
still give their step-0 key and value, and need nothing else.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch
from torch import Tensor
from torch.nn import functional as F

from eagle3.config import UserError
from eagle3.draft.attention import chain_attention
from eagle3.draft.model import Eagle3Drafter
from eagle3.features.record import FeatureSample, supervised_rows

ROWS_PER_CHUNK = 1024  # rows whose (rows, W) logits exist at one time where only their argmax is wanted


@dataclass(frozen=True)
class PackedSequences:
    """Documents one after another on one token axis, without padding."""

    input_ids: Tensor  # (T,) int64
    positions: Tensor  # (T,) int64, from 0 in each document
    loss_mask: Tensor  # (T,) bool
    document_lengths: tuple[int, ...]  # tokens, adding up to T
    aux_hidden_states: Tensor  # (T, A*D)
    target_rows: Tensor  # (S,) int64, ascending: tokens whose last hidden state is here
    last_hidden_states: Tensor  # (S, D) after the target's final norm
    target_logz: Tensor | None  # (S,) fp32
    sample_ids: tuple[str, ...]  # one per document

    def to(self, device: torch.device | str) -> "PackedSequences":
        """Copies the tensors to a device."""
        return replace(
            self,
            input_ids=self.input_ids.to(device),
            positions=self.positions.to(device),
            loss_mask=self.loss_mask.to(device),
            aux_hidden_states=self.aux_hidden_states.to(device),
            target_rows=self.target_rows.to(device),
            last_hidden_states=self.last_hidden_states.to(device),
            target_logz=None if self.target_logz is None else self.target_logz.to(device),
        )

    def counted(self, ttt_steps: int) -> list[Tensor]:
        """Returns, for each of the K steps, the tokens (R_k,) whose row is counted there, ascending."""
        num_tokens = self.loss_mask.numel()
        chain = torch.ones_like(self.loss_mask)  # (T,) loss_mask[t+1] ... loss_mask[t+shift] all true, one document
        rows = []
        for shift in range(1, ttt_steps + 2):
            rest = max(num_tokens - shift, 0)  # tokens that have another one `shift` later
            same_document = self.positions[shift:] == self.positions[:rest] + shift
            chain[:rest] &= self.loss_mask[shift:] & same_document
            chain[rest:] = False
            if shift >= 2:
                rows.append(chain.nonzero().flatten())
        return rows


@dataclass(frozen=True)
class DraftStep:
    """One step of the unrolled drafter, at the rows that are counted there."""

    rows: Tensor  # (R_k,) int64 tokens, ascending
    hidden: Tensor  # (R_k, D) the layer's output before the final norm


@dataclass(frozen=True)
class ChainMatches:
    """Where the drafter's first choices are the recorded tokens."""

    rows: Tensor  # (R,) int64 tokens counted at step 0, ascending
    matches: Tensor  # (R, K) bool: the choice of step k at row t is x[t+2+k]; False where the row is not counted


def pack(samples: list[FeatureSample]) -> PackedSequences:
    """Joins samples, in the order given; of none it makes a pack of no tokens.

    Raises:
        UserError: a sample lacks the last hidden state of a supervised token.
    """
    for sample in samples:
        _check_last_rows(sample)
    lengths = [sample.input_ids.numel() for sample in samples]
    starts = [sum(lengths[:index]) for index in range(len(lengths))]
    logz = [sample.target_logz for sample in samples if sample.target_logz is not None]
    none = torch.zeros(0, dtype=torch.int64)
    return PackedSequences(
        input_ids=torch.cat([none, *(sample.input_ids.long() for sample in samples)]),
        positions=torch.cat([none, *(torch.arange(length) for length in lengths)]),
        loss_mask=torch.cat([none.bool(), *(sample.loss_mask for sample in samples)]),
        document_lengths=tuple(lengths),
        aux_hidden_states=_cat_states([sample.aux_hidden_states for sample in samples]),
        target_rows=torch.cat(
            [none, *(sample.last_rows.long() + start for sample, start in zip(samples, starts, strict=True))]
        ),
        last_hidden_states=_cat_states([sample.last_hidden_states for sample in samples]),
        target_logz=torch.cat(logz) if logz and len(logz) == len(samples) else None,
        sample_ids=tuple(sample.sample_id for sample in samples),
    )


def unroll(
    drafter: Eagle3Drafter,
    embed_tokens: Tensor,  # (V, D) the target's, frozen
    packed: PackedSequences,
    ttt_steps: int,
) -> Iterator[DraftStep]:
    """Runs the K draft steps on recorded tokens, each at the rows that are counted there.

    The later steps read the recorded token, not the drafter's choice: a served chain goes on only where the two agree.
    """
    counted = packed.counted(ttt_steps)
    rows = counted[0]
    if rows.numel() == 0:
        nothing = packed.aux_hidden_states.new_zeros(0, drafter.config.hidden_size, dtype=drafter.compute_dtype())
        yield from (DraftStep(rows=none, hidden=nothing) for none in counted)
        return
    hidden = drafter.fuse(packed.aux_hidden_states)  # (T, D)
    embeds = F.embedding(_next_ids(packed), embed_tokens)  # (T, D)
    attention_input = drafter.attention_input(embeds, hidden)  # (T, 2D)
    keys, values = drafter.keys_values(attention_input, packed.positions)  # (T, n_kv, d)
    query = drafter.queries(attention_input[rows], packed.positions[rows])  # (R_0, n_q, d)
    own_keys = keys.new_zeros(rows.numel(), 0, *keys.shape[1:])  # (R_k, k, n_kv, d)
    own_values = own_keys
    lengths = packed.document_lengths
    attended = chain_attention(query, keys, values, own_keys, own_values, rows, lengths)
    output = drafter.finish(hidden[rows], attended)  # (R_0, D)
    yield DraftStep(rows=rows, hidden=output)
    for step in range(1, ttt_steps):
        kept = torch.searchsorted(rows, counted[step])  # which rows of the step before go on
        rows = counted[step]  # (R_k,)
        hidden = drafter.feedback(output[kept])  # (R_k, D)
        embeds = F.embedding(packed.input_ids[rows + 1 + step], embed_tokens)  # (R_k, D)
        query, key, value = drafter.qkv(embeds, hidden, packed.positions[rows] + step)
        own_keys = torch.cat([own_keys[kept], key[:, None]], dim=1)
        own_values = torch.cat([own_values[kept], value[:, None]], dim=1)
        attended = chain_attention(query, keys, values, own_keys, own_values, rows, lengths)
        output = drafter.finish(hidden, attended)  # (R_k, D)
        yield DraftStep(rows=rows, hidden=output)


@torch.no_grad()
def chain_matches(
    drafter: Eagle3Drafter,
    embed_tokens: Tensor,  # (V, D)
    packed: PackedSequences,
    ttt_steps: int,
) -> ChainMatches:
    """Compares the drafter's first choice at every row and step with the recorded token."""
    target_ids = drafter.target_ids
    rows = packed.counted(ttt_steps)[0]
    matches = torch.zeros(rows.numel(), ttt_steps, dtype=torch.bool, device=rows.device)
    for index, step in enumerate(unroll(drafter, embed_tokens, packed, ttt_steps)):
        for some_rows, hidden in zip(step.rows.split(ROWS_PER_CHUNK), step.hidden.split(ROWS_PER_CHUNK), strict=True):
            drafted = target_ids[drafter.logits(hidden).argmax(-1)]  # (R_chunk,)
            matches[torch.searchsorted(rows, some_rows), index] = drafted == packed.input_ids[some_rows + 2 + index]
    return ChainMatches(rows=rows, matches=matches)


def _next_ids(packed: PackedSequences) -> Tensor:  # (T,)
    """Returns each token's successor.

    A document's last token has none and gets itself; no counted row attends to it.
    """
    has_next = packed.positions.roll(-1) > packed.positions
    return torch.where(has_next, packed.input_ids.roll(-1), packed.input_ids)


def _cat_states(states: list[Tensor]) -> Tensor:
    return torch.cat(states) if states else torch.zeros(0, 0)


def _check_last_rows(sample: FeatureSample) -> None:
    needed = supervised_rows(sample.loss_mask)
    missing = needed[~torch.isin(needed, sample.last_rows)]
    if missing.numel():
        raise UserError(
            f"last_rows must hold the row before every supervised token, got none for row {int(missing[0])} and "
            f"{missing.numel() - 1} more (sample {sample.sample_id!r}); capture the sample again"
        )
