"""What becomes of a chain of drafts at every place where a round could start.

SGLang accepts a draft that is the token the target says: its choice at T = 0, its sample at T > 0. A chain whose draft
was wrong drafts nothing that matters any more, so its row leaves. With rejection sampling drafts are sampled as well,
and a recorded token y is accepted with probability min(1, q(y) / p(y)): in expectation over y the sum of min(p, q).
"""

import torch
from torch import Tensor

from eagle3.draft.model import Eagle3Drafter
from eagle3.draft.target_weights import LOGITS_PER_CHUNK, TargetWeights
from eagle3.draft.ttt import ROWS_PER_CHUNK, ChainMatches, Chains, PackedSequences, unroll


@torch.no_grad()
def compared_chains(
    drafter: Eagle3Drafter,
    embed_tokens: Tensor,  # (V, D)
    packed: PackedSequences,
    num_steps: int,
) -> ChainMatches:
    """Returns which drafts are the recorded tokens, up to the first of each chain that is not."""
    target_ids = drafter.target_ids  # (W,)
    chains = Chains(drafter, embed_tokens, packed, num_steps)
    rows = packed.counted(1)[0].to(packed.input_ids.device)  # (R,)
    num_steps_of = packed.steps_per_row(num_steps).to(rows.device)  # (T,)
    matches = torch.zeros(rows.numel(), num_steps, dtype=torch.bool, device=rows.device)
    alive, alive_index = rows, torch.arange(rows.numel(), device=rows.device)
    for index in range(num_steps):
        if alive.numel() == 0:
            break
        normed = chains.advance(alive).normed  # (alive, D)
        drafted = torch.cat([drafter.lm_head(part).argmax(-1) for part in normed.split(ROWS_PER_CHUNK)])
        matched = is_right(target_ids[drafted], packed.input_ids[alive + 2 + index])
        matches[alive_index, index] = matched
        goes_on = matched & (num_steps_of[alive] > index + 1)
        alive, alive_index = alive[goes_on], alive_index[goes_on]
    return ChainMatches(rows=rows, matches=matches)


def is_right(drafted: Tensor, recorded: Tensor) -> Tensor:
    """Returns which drafted tokens are the recorded ones."""
    return drafted == recorded


@torch.no_grad()
def sampled_chains(
    drafter: Eagle3Drafter, target: TargetWeights, packed: PackedSequences, num_steps: int, temperature: float
) -> ChainMatches:
    """Returns the probability (R, K) that rejection sampling accepts each recorded token, once those before it are.

    Target and drafter sample at `temperature`; the target's probabilities are those of the recorded last states.
    """
    rows = packed.counted(1)[0].to(packed.input_ids.device)
    draft_ids = _draft_ids(drafter)  # (V,)
    log_p = _recorded_log_probs(target, packed, temperature)  # (T,)
    accepted = torch.zeros(rows.numel(), num_steps, device=rows.device)
    for index, step in enumerate(unroll(drafter, target.embed_tokens, packed, num_steps)):
        for some_rows, normed in zip(step.rows.split(ROWS_PER_CHUNK), step.normed.split(ROWS_PER_CHUNK), strict=True):
            log_q = (drafter.lm_head(normed).float() / temperature).log_softmax(-1)  # (R_chunk, W)
            tokens = some_rows + 2 + index
            drafted = draft_ids[packed.input_ids[tokens]]  # (R_chunk,) -1: cannot be drafted
            ratio = (log_q.gather(1, drafted.clamp(min=0)[:, None])[:, 0] - log_p[tokens]).exp().clamp(max=1)
            accepted[torch.searchsorted(rows, some_rows), index] = ratio.where(drafted >= 0, 0)
    return ChainMatches(rows=rows, matches=accepted)


def _draft_ids(drafter: Eagle3Drafter) -> Tensor:  # (V,)
    """Returns the draft token of each target token, -1 where there is none."""
    target_ids = drafter.target_ids
    draft_ids = torch.full((drafter.config.vocab_size,), -1, device=target_ids.device)
    draft_ids[target_ids] = torch.arange(target_ids.numel(), device=target_ids.device)
    return draft_ids


def _recorded_log_probs(target: TargetWeights, packed: PackedSequences, temperature: float) -> Tensor:  # (T,)
    """Returns the target's log-probability of each recorded token whose predecessor's last state is there; else 0."""
    log_p = torch.zeros(packed.input_ids.numel(), device=packed.input_ids.device)
    rows = packed.target_rows.to(log_p.device)  # (S,)
    has_next = rows + 1 < log_p.numel()
    rows, last = rows[has_next], packed.last_hidden_states[has_next]
    num_rows = max(1, LOGITS_PER_CHUNK // target.lm_head.shape[0])
    for some_rows, states in zip(rows.split(num_rows), last.split(num_rows), strict=True):
        logits = (states.to(target.lm_head) @ target.lm_head.T).float() / temperature  # (chunk, V)
        chosen = logits.gather(1, packed.input_ids[some_rows + 1, None])[:, 0]
        log_p[some_rows + 1] = chosen - logits.logsumexp(-1)
    return log_p
