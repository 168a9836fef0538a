"""Reference speculative decoder: chains of drafts, verified exactly, with every round counted.

It shares nothing with the simulator or with training but the drafter's one step, so that agreement between them means
something. Plain greedy decoding is the same loop with no drafts.
"""

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from eagle3.draft.model import Eagle3Drafter
from eagle3.evaluation.target import LocalTarget, SlotCache


@dataclass(frozen=True)
class Answer:
    """What one prompt got."""

    token_ids: list[int]  # emitted, the one from prefill included, up to the end token or the limit
    accepted: list[int]  # drafts that each verify round accepted; the last round may accept past the end

    @property
    def num_tokens(self) -> int:
        """N, as in SGLang's completion_tokens."""
        return len(self.token_ids)

    @property
    def rounds(self) -> int:
        """R, as in SGLang's spec_verify_ct."""
        return len(self.accepted)


class ChainDrafter:
    """A drafter with its keys and values: of true features up to the last accepted token, of drafts beyond it."""

    def __init__(
        self, drafter: Eagle3Drafter, embed_tokens: Tensor, num_draft_tokens: int, num_slots: int, capacity: int
    ) -> None:
        self.num_draft_tokens = num_draft_tokens  # K
        self._drafter = drafter
        self._embed_tokens = embed_tokens  # (V, D), the target's
        self._target_ids = drafter.target_ids  # (W,)
        shape = (num_slots, capacity, drafter.config.num_key_value_heads, drafter.config.head_dim)
        self._keys = embed_tokens.new_zeros(shape)
        self._values = embed_tokens.new_zeros(shape)

    def draft(self, slots: slice, aux: Tensor, next_ids: Tensor, positions: Tensor, last: Tensor) -> Tensor:
        """Reads true features; returns the tokens drafted after row `last` of each of the s slots, (s, K) target ids.

        aux is (s, n, A*D), next_ids and positions are (s, n), last (s,) an index into n. Rows beyond `last` may hold
        anything: their keys are overwritten before they are read.
        """
        keys, values = self._keys[slots], self._values[slots]  # views (s, capacity, n_kv, d)
        rows = torch.arange(keys.shape[0], device=positions.device)  # (s,)
        hidden = self._drafter.fuse(aux.flatten(0, 1))  # (s*n, D)
        attention_input = self._drafter.attention_input(self._embed(next_ids.flatten()), hidden)
        true_keys, true_values = self._drafter.keys_values(attention_input, positions.flatten())  # (s*n, n_kv, d)
        keys[rows[:, None], positions] = true_keys.unflatten(0, positions.shape)
        values[rows[:, None], positions] = true_values.unflatten(0, positions.shape)

        # Only the last true row predicts; the others have given what they owe, their keys.
        flat_last = rows * positions.shape[1] + last
        position = positions.flatten()[flat_last]  # (s,)
        length = int(position.max()) + self.num_draft_tokens
        query = self._drafter.queries(attention_input[flat_last], position)
        attended = _attend(query, keys[:, :length], values[:, :length], position)
        output = self._drafter.finish(hidden[flat_last], attended)  # (s, D)
        drafted = [self._greedy(output)]
        while len(drafted) < self.num_draft_tokens:
            position = position + 1
            hidden = self._drafter.feedback(output)
            query, own_key, own_value = self._drafter.qkv(self._embed(drafted[-1]), hidden, position)
            keys[rows, position] = own_key
            values[rows, position] = own_value
            attended = _attend(query, keys[:, :length], values[:, :length], position)
            output = self._drafter.finish(hidden, attended)
            drafted.append(self._greedy(output))
        return torch.stack(drafted, dim=1)

    def keep(self, slots: Tensor) -> None:
        """Drops every slot but `slots` (N,)."""
        self._keys = self._keys[slots]
        self._values = self._values[slots]

    def _embed(self, token_ids: Tensor) -> Tensor:
        return F.embedding(token_ids, self._embed_tokens)  # (N, D)

    def _greedy(self, output: Tensor) -> Tensor:
        return self._target_ids[self._drafter.logits(output).max(dim=-1).indices]  # (s,)


def _attend(query: Tensor, keys: Tensor, values: Tensor, position: Tensor) -> Tensor:
    """Attends with one query (s, n_q, d) per slot to its keys (s, length, n_kv, d) up to its own position (s,)."""
    visible = torch.arange(keys.shape[1], device=position.device) <= position[:, None]  # (s, length)
    # Query heads that share a key head become rows of one product: (s, n_kv, n_q / n_kv, d).
    grouped = query.unflatten(1, (keys.shape[2], -1))
    attended = F.scaled_dot_product_attention(
        grouped, keys.transpose(1, 2), values.transpose(1, 2), attn_mask=visible[:, None, None]
    )
    return attended.flatten(1, 2)


def decode(
    target: LocalTarget,
    drafter: Eagle3Drafter | None,
    prompts: list[list[int]],
    *,
    num_draft_tokens: int,
    max_new_tokens: int,
    batch_size: int,
    on_answer: Callable[[Answer], None] | None = None,
) -> list[Answer]:
    """Returns the target's greedy answers, in the order of `prompts`; without a drafter each round emits one token.

    Up to `batch_size` prompts are decoded in lockstep; one that ends makes room for the next.

    Raises:
        UserError: the target cannot be decoded in this process.
    """
    capacity = max(len(prompt) for prompt in prompts) + max_new_tokens + 2 * num_draft_tokens
    num_slots = min(batch_size, len(prompts))
    chain_drafter = None
    if drafter is not None:
        chain_drafter = ChainDrafter(drafter, target.embed_tokens, num_draft_tokens, num_slots, capacity)
    lockstep = _Lockstep(target, chain_drafter, target.start(num_slots, capacity), max_new_tokens)
    return lockstep.run(prompts, on_answer or (lambda answer: None))


@dataclass
class _Sequence:
    """One answer in progress."""

    index: int  # of its prompt
    prompt: list[int]
    token_ids: list[int]
    accepted: list[int]
    drafted: list[int]  # (K,) what follows token_ids, by the drafter

    @property
    def newest_position(self) -> int:
        """Where the newest token stands; the target has not read it yet."""
        return len(self.prompt) + len(self.token_ids) - 1


class _Lockstep:
    """Sequences that share their forwards: one verify forward is one round of each."""

    def __init__(
        self, target: LocalTarget, drafter: ChainDrafter | None, cache: SlotCache, max_new_tokens: int
    ) -> None:
        self.target = target
        self.drafter = drafter
        self.num_draft_tokens = drafter.num_draft_tokens if drafter is not None else 0  # K
        self.cache = cache
        self.max_new_tokens = max_new_tokens

    @torch.inference_mode()
    def run(self, prompts: list[list[int]], on_answer: Callable[[Answer], None]) -> list[Answer]:
        """Decodes all prompts to their ends."""
        answers: dict[int, Answer] = {}  # by index of the prompt
        # Neighbours in length share the batch: a forward reads as many rows of every slot as the longest one needs.
        waiting = deque(sorted(range(len(prompts)), key=lambda index: len(prompts[index])))

        def occupy(slot: int, sequence: _Sequence | None) -> _Sequence | None:
            """Returns whose slot it is now: the sequence if it goes on, else the next that needs a round, if any."""
            while sequence is None or self._is_finished(sequence):
                if sequence is not None:
                    answers[sequence.index] = Answer(sequence.token_ids, sequence.accepted)
                    on_answer(answers[sequence.index])
                if not waiting:
                    return None
                index = waiting.popleft()
                sequence = self._prefill(slot, index, prompts[index])
            return sequence

        slots: list[_Sequence | None] = [None] * self.cache.num_slots
        while True:
            slots = [occupy(slot, sequence) for slot, sequence in enumerate(slots)]
            active = [sequence for sequence in slots if sequence is not None]
            if not active:
                break
            if len(active) < len(slots):
                self._keep([slot for slot, sequence in enumerate(slots) if sequence is not None])
                slots = [*active]
            self._round(active)
        return [answers[index] for index in range(len(prompts))]

    def _is_finished(self, sequence: _Sequence) -> bool:
        return sequence.token_ids[-1] in self.target.end_ids or len(sequence.token_ids) == self.max_new_tokens

    def _prefill(self, slot: int, index: int, prompt: list[int]) -> _Sequence:
        """Reads a prompt into a slot; returns it with its first token and the drafts after that."""
        hidden = self.target.prefill(self.cache, slot, prompt)  # (1, P, D)
        first_id = self.target.greedy(hidden[:, -1])  # (1,)
        sequence = _Sequence(index, prompt, first_id.tolist(), [], [])
        next_ids = torch.tensor([prompt[1:] + sequence.token_ids], device=self.target.device)  # (1, P)
        positions = torch.arange(len(prompt), device=self.target.device)[None]
        last = torch.tensor([len(prompt) - 1], device=self.target.device)
        self._draft([sequence], slice(slot, slot + 1), next_ids, positions, last)
        return sequence

    def _round(self, sequences: list[_Sequence]) -> None:
        """Verifies each sequence's drafts, gives it what it gained, and drafts anew."""
        device = self.target.device
        every_slot = slice(0, len(sequences))
        verified = torch.tensor([[s.token_ids[-1], *s.drafted] for s in sequences], device=device)  # (S, K+1)
        newest = torch.tensor([sequence.newest_position for sequence in sequences], device=device)  # (S,)
        positions = newest[:, None] + torch.arange(self.num_draft_tokens + 1, device=device)  # (S, K+1)
        length = max(sequence.newest_position for sequence in sequences) + self.num_draft_tokens + 1
        hidden = self.target.forward(self.cache, every_slot, verified, positions, length)
        chosen = self.target.greedy(hidden)  # (S, K+1), the target's token after each
        accepted = (verified[:, 1:] == chosen[:, :-1]).long().cumprod(dim=1).sum(dim=1)  # (S,)
        for sequence, tokens, num_accepted in zip(sequences, chosen.tolist(), accepted.tolist(), strict=True):
            sequence.accepted.append(num_accepted)
            for token in tokens[: num_accepted + 1]:
                sequence.token_ids.append(token)
                if self._is_finished(sequence):
                    break
        self._draft(sequences, every_slot, chosen, positions, accepted)

    def _draft(
        self, sequences: list[_Sequence], slots: slice, next_ids: Tensor, positions: Tensor, last: Tensor
    ) -> None:
        if self.drafter is None:
            return
        drafted = self.drafter.draft(slots, self.target.captured(), next_ids, positions, last)
        for sequence, tokens in zip(sequences, drafted.tolist(), strict=True):
            sequence.drafted = tokens

    def _keep(self, slots: list[int]) -> None:
        """Lets go of the slots that nobody waits for."""
        kept = torch.tensor(slots, device=self.target.device)
        self.cache.keep(kept)
        if self.drafter is not None:
            self.drafter.keep(kept)
