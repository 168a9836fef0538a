"""The bookkeeping of EAGLE's rounds: a tree of drafted tokens is laid out, then walked along the target's choices.

A tree of n nodes is numbered from its root, 0: the last token that the target chose. `next_token` is a node's first
child and `next_sibling` its parent's next child, -1 if there is none.
"""

from typing import Any, NoReturn

import torch
from torch import Tensor

FULL_MASK, QUERY_MASK = 0, 1  # of SGLang's tree mask modes: over all keys, or over the drafted ones alone


def fill_bonus_tokens_cpu(accept_tokens: Tensor, accept_lens: Tensor, bonus_tokens: Tensor, accept_stride: int) -> None:
    """Picks the last accepted token of each request, out of rows of `accept_stride`."""
    rows = torch.arange(accept_lens.numel()) * accept_stride
    bonus_tokens.copy_(accept_tokens.flatten()[rows + accept_lens.long() - 1])


def fill_accept_out_cache_loc_cpu(
    accept_index: Tensor, out_cache_loc: Tensor, accept_out_cache_loc: Tensor, *sizes: int
) -> None:
    """Gathers the slots of accepted tokens; -1 marks the rejected."""
    accepted = accept_index.flatten().long()
    slots = out_cache_loc[accepted[accepted > -1]]
    accept_out_cache_loc[: slots.numel()] = slots


def rotate_input_ids_cpu(
    input_ids: Tensor,
    extend_start_loc: Tensor,
    extend_seq_lens: Tensor,
    topk_index: Tensor,
    select_index: Tensor | None = None,
) -> None:
    """Moves each request's ids one to the left and puts its drafted token at the end (or at `select_index`)."""
    for b, (start, length) in enumerate(zip(extend_start_loc.tolist(), extend_seq_lens.tolist(), strict=False)):
        last = start + length - 1
        input_ids[start:last] = input_ids[start + 1 : last + 1].clone()
        place = last if select_index is None else int(select_index[b])
        input_ids[place] = topk_index.flatten()[b].to(input_ids.dtype)


def build_tree_kernel_efficient_cpu(
    parent_list: Tensor,
    selected_index: Tensor,
    verified_seq_len: Tensor,
    tree_mask: Tensor,
    positions: Tensor,
    retrive_index: Tensor,
    retrive_next_token: Tensor,
    retrive_next_sibling: Tensor,
    topk: int,
    depth: int,
    draft_token_num: int,
    tree_mask_mode: int,
) -> None:
    """Fills the mask (whom a drafted token sees), the positions and the links of each request's tree."""
    num_nodes, mode = draft_token_num, int(tree_mask_mode)
    if mode not in (FULL_MASK, QUERY_MASK):
        raise NotImplementedError(f"tree_mask_mode must be {FULL_MASK} or {QUERY_MASK}, got {mode}")
    positions = positions.view(-1)
    masked = 0  # entries of the mask that are filled
    for b, num_tokens in enumerate(verified_seq_len.tolist()):
        parents = _parents(selected_index[b].tolist(), parent_list[b].tolist(), topk)
        first_child, sibling = [-1] * num_nodes, [-1] * num_nodes
        for node in range(num_nodes - 1, 0, -1):  # backwards, so that children are linked in their order
            sibling[node] = first_child[parents[node]]
            first_child[parents[node]] = node
        retrive_index[b] = torch.arange(b * num_nodes, (b + 1) * num_nodes)
        retrive_next_token[b] = torch.tensor(first_child)
        retrive_next_sibling[b] = torch.tensor(sibling)
        visible = torch.zeros(num_nodes, num_nodes, dtype=torch.bool)
        for node in range(num_nodes):
            path = [node]
            while path[-1] != 0:
                path.append(parents[path[-1]])
            visible[node, path] = True
            positions[b * num_nodes + node] = num_tokens + len(path) - 1
        width = num_nodes if mode == QUERY_MASK else num_tokens + num_nodes
        block = tree_mask.view(-1)[masked : masked + num_nodes * width].view(num_nodes, width)
        block[:, width - num_nodes :] = visible.to(tree_mask.dtype)
        masked += num_nodes * width


def _parents(selected: list[int], parent_of_group: list[int], topk: int) -> list[int]:
    """Returns each node's parent; node i + 1 is candidate selected[i], and candidates come in groups of topk."""
    parents = [-1]
    for candidate in selected:
        group = candidate // topk
        parents.append(0 if group == 0 else selected.index(parent_of_group[group]) + 1)
    return parents


def verify_tree_greedy_cpu(
    predicts: Tensor,
    accept_index: Tensor,
    accept_token_num: Tensor,
    candidates: Tensor,
    retrive_index: Tensor,
    retrive_next_token: Tensor,
    retrive_next_sibling: Tensor,
    target_predict: Tensor,
) -> None:
    """Walks each tree as long as a child is the target's own choice, then takes the target's token."""
    drafted, rows = candidates.tolist(), retrive_index.tolist()
    first_child, sibling = retrive_next_token.tolist(), retrive_next_sibling.tolist()
    chosen = target_predict.flatten().tolist()
    predicts = predicts.view(-1)
    for b in range(candidates.shape[0]):
        node, row, num_accepted = 0, rows[b][0], 0
        accept_index[b, 0] = row
        while num_accepted + 1 < accept_index.shape[1]:
            node = first_child[b][node]
            while node != -1 and drafted[b][node] != chosen[row]:
                node = sibling[b][node]
            if node == -1:
                break
            predicts[row] = chosen[row]
            num_accepted += 1
            row = rows[b][node]
            accept_index[b, num_accepted] = row
        accept_token_num[b] = num_accepted
        predicts[row] = chosen[row]


def reconstruct_indices_from_tree_mask(*args: Any, **kwargs: Any) -> NoReturn:
    raise NotImplementedError("reconstruct_indices_from_tree_mask: n-gram speculation needs the real sgl_kernel")
