"""Drafting written out one path at a time, with lists: what trees and sampled chains are compared with."""

import torch
from tiny_drafters import dense_attention
from torch import Tensor
from torch.nn import functional as F

from eagle3.draft.model import Eagle3Drafter


class OnePlace:
    """What one path sees: keys and values of the true features, then of whatever stood at its place at each step."""

    def __init__(self, keys: Tensor, values: Tensor) -> None:
        self.keys, self.values = keys, values


class Drafting:
    """Drafts after the true tokens ids[0..t+1] with captured states of ids[0..t]."""

    def __init__(self, drafter: Eagle3Drafter, embed_tokens: Tensor, aux: Tensor, ids: list[int], t: int) -> None:
        self.drafter, self.embed_tokens, self.t = drafter, embed_tokens, t
        hidden = drafter.fuse(aux[: t + 1])
        embeds = F.embedding(torch.tensor(ids[1 : t + 2]), embed_tokens)
        query, self.keys, self.values = drafter.qkv(embeds, hidden, torch.arange(t + 1))
        output = drafter.finish(hidden[-1:], dense_attention(query[-1:], self.keys, self.values))
        self.probs, self.hidden = self.read(output)

    def read(self, output: Tensor) -> tuple[Tensor, Tensor]:
        return self.drafter.logits(output)[0].softmax(-1), self.drafter.feedback(output)

    def place(self) -> OnePlace:
        return OnePlace(self.keys, self.values)

    def feed(self, place: OnePlace, token: int, hidden: Tensor, depth: int) -> tuple[Tensor, Tensor]:
        """Feeds a drafted token of this depth (1 is the first); returns the next probabilities and hidden state."""
        embeds = F.embedding(torch.tensor([token]), self.embed_tokens)
        query, key, value = self.drafter.qkv(embeds, hidden, torch.tensor([self.t + depth]))
        place.keys, place.values = torch.cat([place.keys, key]), torch.cat([place.values, value])
        return self.read(self.drafter.finish(hidden, dense_attention(query, place.keys, place.values)))


@torch.no_grad()
def tree_paths(drafting: Drafting, num_steps: int, topk: int, num_draft_tokens: int) -> set[tuple[int, ...]]:
    """Returns the paths of a tree's drafts, each as its tokens."""
    target_ids = drafting.drafter.target_ids.tolist()

    def likeliest(probs: Tensor) -> list[tuple[float, int]]:
        return [(float(probs[i]), target_ids[i]) for i in probs.topk(topk).indices.tolist()]

    candidates: list[tuple[float, tuple[int, ...]]] = [(score, (token,)) for score, token in likeliest(drafting.probs)]
    beams = [(score, path, drafting.hidden) for score, path in candidates]
    places = [drafting.place() for _ in range(topk)]
    for depth in range(1, num_steps):
        grown = []
        for place, (score, path, hidden) in zip(places, beams, strict=True):
            probs, fed_back = drafting.feed(place, path[-1], hidden, depth)
            grown += [(score * p, (*path, token), fed_back) for p, token in likeliest(probs)]
        candidates += [(score, path) for score, path, _ in grown]
        beams = sorted(grown, key=lambda each: -each[0])[:topk]
    best = sorted(candidates, key=lambda each: -each[0])[: num_draft_tokens - 1]
    return {path for _, path in best}


def tree_rounds(
    drafter: Eagle3Drafter, embed_tokens: Tensor, aux: Tensor, ids: list[int], first: int, sizes: tuple[int, int, int]
) -> int:
    """Counts the rounds of the answer ids[first:]: each goes on from where the tree left the recorded tokens."""
    anchor, rounds = first - 1, 0
    while anchor + 2 < len(ids):
        paths = tree_paths(Drafting(drafter, embed_tokens, aux, ids, anchor), *sizes)
        accepted = 0
        while tuple(ids[anchor + 2 : anchor + 3 + accepted]) in paths and anchor + 2 + accepted < len(ids):
            accepted += 1
        rounds += 1
        anchor += accepted + 1
    return rounds


@torch.no_grad()
def chain_probs(drafting: Drafting, tokens: list[int], temperature: float) -> list[float]:
    """Returns the drafter's probability of each token of a chain, at a temperature; 0 for those it cannot draft."""
    draft_ids = {target: draft for draft, target in enumerate(drafting.drafter.target_ids.tolist())}
    place, probs, hidden, found = drafting.place(), drafting.probs, drafting.hidden, []
    for depth, token in enumerate(tokens, start=1):
        tempered = probs.log().div(temperature).softmax(-1)
        found.append(float(tempered[draft_ids[token]]) if token in draft_ids else 0.0)
        probs, hidden = drafting.feed(place, token, hidden, depth)
    return found
