"""Trees of drafts as SGLang builds them, at every place where a round could start.

At each step the `topk` likeliest paths grow by their `topk` likeliest tokens each, and in the end the drafts with the
highest products of probabilities stay, as many as the budget has room for. What a reader would get wrong: a path's
keys of earlier steps are those of its *place among the paths*, whoever had it then, not those of its ancestors.
Source: SGLang 0.5.23, srt/speculative/spec_utils.py (`select_top_k_tokens`), eagle_utils.py
(`organize_draft_results`), kernels/ops/speculative/cache_locs.py (`generate_draft_decode_kv_indices`).
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from eagle3.draft.attention import Places, draft_attention
from eagle3.draft.context_attention import Documents
from eagle3.draft.fusion import TokenHeads
from eagle3.draft.layer import Rotation, embeds_heads, finish, layer_weights, project
from eagle3.draft.model import Eagle3Drafter
from eagle3.draft.ttt import ROWS_PER_CHUNK, ChainMatches, Chains, PackedSequences
from eagle3.evaluation.chains import is_right


@dataclass(frozen=True)
class DraftTrees:
    """All candidates of some rows' trees; C = topk + (steps - 1) * topk**2."""

    rows: Tensor  # (R,) int64 tokens, ascending
    tokens: Tensor  # (R, C) target ids
    scores: Tensor  # (R, C) fp32 products of draft probabilities along the path
    parents: Tensor  # (R, C) the candidate that each continues, -1: the last true token


@torch.no_grad()
def draft_trees(
    drafter: Eagle3Drafter,
    embed_tokens: Tensor,  # (V, D)
    packed: PackedSequences,
    num_steps: int,
    topk: int,
) -> DraftTrees:
    """Drafts from every row where the token after next is among the first `topk`; no other row accepts anything."""
    config, weights, target_ids = drafter.config, layer_weights(drafter), drafter.target_ids
    chains = Chains(drafter, embed_tokens, packed, num_steps)
    rows = packed.counted(1)[0].to(packed.input_ids.device)  # (R,)
    step = chains.advance(rows)
    probs, first = _topk_drafts(drafter, step.normed, topk)  # (R, topk)
    first = target_ids[first]
    alive = is_right(first, packed.input_ids[rows + 2, None]).any(1)
    rows, probs, first = rows[alive], probs[alive], first[alive]
    fed = step.normed if config.norm_output else step.hidden
    hidden = fed[alive][:, None].expand(-1, topk, -1)  # (R, topk, D)
    tokens, scores, parents = [first], [probs], [torch.full_like(first, -1)]
    beams, beam_scores = first, probs  # (R, topk)
    beam_candidates = torch.arange(topk, device=rows.device).expand(rows.numel(), -1)
    context = chains.context
    tables = drafter.rope_tables(max(packed.document_lengths, default=0) + num_steps)
    every_row = torch.arange(rows.numel(), device=rows.device)
    row_of_token = torch.full_like(packed.input_ids, -1)
    row_of_token[rows] = every_row
    places = Places(rows, row_of_token, Documents.of(packed.document_lengths, packed.input_ids.device))
    links = [context.new_zeros(num_steps - 1, *context.shape) for _ in range(topk)]  # keys and values by place
    num_rotated = config.num_attention_heads + config.num_key_value_heads
    for index in range(1, num_steps if rows.numel() else 1):
        grown_probs, grown_tokens, outputs = [], [], []
        rotation = Rotation(packed.positions[rows] + index, tables, num_rotated, config.head_dim)
        for place in range(topk):
            embeds = TokenHeads(embeds_heads(embed_tokens, beams[:, place], weights, config.head_dim), every_row, 0)
            projected, residual, _ = project(embeds, hidden[:, place], weights, weights.query_key_value, rotation)
            attended, link = draft_attention(projected, context, links[place], index, places)
            assert link is not None, place
            links[place] = link
            output, normed = finish(residual, attended, weights)
            probs, drafted = _topk_drafts(drafter, normed, topk)
            grown_probs.append(beam_scores[:, place, None] * probs)
            grown_tokens.append(target_ids[drafted])
            outputs.append(normed if config.norm_output else output)
        grown = torch.stack(grown_probs, 1).flatten(1)  # (R, topk**2)
        grown_ids = torch.stack(grown_tokens, 1).flatten(1)
        tokens.append(grown_ids)
        scores.append(grown)
        parents.append(beam_candidates.repeat_interleave(topk, dim=1))
        beam_scores, chosen = grown.topk(topk, dim=-1)  # (R, topk)
        beams = grown_ids.gather(1, chosen)
        from_place = (chosen // topk)[..., None].expand(-1, -1, config.hidden_size)
        hidden = torch.stack(outputs, 1).gather(1, from_place)
        beam_candidates = chosen + topk + topk**2 * (index - 1)
    return DraftTrees(rows, torch.cat(tokens, 1), torch.cat(scores, 1), torch.cat(parents, 1))


def tree_chains(trees: DraftTrees, packed: PackedSequences, num_steps: int, num_draft_tokens: int) -> ChainMatches:
    """Returns how far each row's tree, cut to `num_draft_tokens` with its root, follows the recorded tokens."""
    kept = torch.zeros_like(trees.scores, dtype=torch.bool)
    budget = min(num_draft_tokens - 1, kept.shape[1])
    if trees.rows.numel():
        kept.scatter_(1, trees.scores.topk(budget, dim=-1).indices, True)
    all_rows = packed.counted(1)[0].to(packed.input_ids.device)  # (R_0,)
    matches = torch.zeros(all_rows.numel(), num_steps, dtype=torch.bool, device=all_rows.device)
    where = torch.searchsorted(all_rows, trees.rows)
    num_steps_of = packed.steps_per_row(num_steps).to(all_rows.device)[trees.rows]  # (R,)
    node = torch.full_like(trees.rows, -1)
    goes_on = torch.ones_like(trees.rows, dtype=torch.bool)
    last_token = packed.input_ids.numel() - 1
    for depth in range(num_steps):
        recorded = packed.input_ids[(trees.rows + 2 + depth).clamp(max=last_token)]  # (R,)
        # A node's children have different tokens, so that one of them at most is the recorded one.
        is_next = kept & (trees.parents == node[:, None]) & (trees.tokens == recorded[:, None])
        goes_on = goes_on & is_next.any(1) & (num_steps_of > depth)
        matches[where, depth] = goes_on
        node = is_next.int().argmax(1).where(goes_on, -2)  # -2: nobody's parent
    return ChainMatches(rows=all_rows, matches=matches)


def _topk_drafts(drafter: Eagle3Drafter, normed: Tensor, topk: int) -> tuple[Tensor, Tensor]:  # (N, D) -> (N, topk)
    """Returns the likeliest draft tokens' probabilities in fp32, and the tokens."""
    parts = [drafter.lm_head(part).float().softmax(-1).topk(topk, dim=-1) for part in normed.split(ROWS_PER_CHUNK)]
    return torch.cat([part.values for part in parts]), torch.cat([part.indices for part in parts])
