"""Batched decoding with a model in this process: a slot whose answer has ended takes the next prompt.

The cache is addressed by position, not appended to, so sequences of any length share a batch without padding; each
prompt is prefilled alone.
"""

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
import xxhash
from torch import Tensor
from transformers.cache_utils import Cache
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from eagle3.config import RegenerateConfig
from eagle3.prompts.loops import first_occurrence_end

LOOP_CHECK_EVERY = 16  # tokens of one answer; a check takes as long as a few tokens' bookkeeping
COMPACT_SHARE = 0.25  # of the slots idle, at the end, before the cache is copied without them


@dataclass(frozen=True)
class Generation:
    """One answer, as generated."""

    ids: list[int]  # its end token included, if that was reached
    finished: bool  # it ended with an end token
    looped: bool  # it repeated itself and was cut after the first time


class SlotCache(Cache):
    """Keys and values of every layer; slot s keeps the token at position j in row j."""

    def __init__(self, num_slots: int, capacity: int) -> None:
        super().__init__(layers=[])
        self.num_slots = num_slots
        self._capacity = capacity
        self._buffers: list[tuple[Tensor, Tensor]] = []  # per layer (S, capacity, n_kv, d), keys and values
        self._written = (torch.empty(0), torch.empty(0))  # slots (s, 1) and positions (s, n) of this forward's tokens
        self._read = (slice(0), 0)  # slots and length that this forward may read

    def at(self, slots: slice, positions: Tensor, length: int) -> None:
        """Says where the next forward's tokens lie: `slots` at `positions` (s, n), all below `length`."""
        self._written = (torch.arange(self.num_slots, device=positions.device)[slots, None], positions)
        self._read = (slots, length)

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """Stores keys and values (s, n_kv, n, d) of a layer; returns those of its slots (s, n_kv, length, d)."""
        if layer_idx == len(self._buffers):
            # Zeros, since a masked row still takes part in a product and must be finite.
            shapes = [(self.num_slots, self._capacity, x.shape[1], x.shape[3]) for x in (key_states, value_states)]
            self._buffers.append((key_states.new_zeros(shapes[0]), value_states.new_zeros(shapes[1])))
        keys, values = self._buffers[layer_idx]
        keys[self._written] = key_states.transpose(1, 2)
        values[self._written] = value_states.transpose(1, 2)
        slots, length = self._read
        return keys[slots, :length].transpose(1, 2), values[slots, :length].transpose(1, 2)

    def keep(self, slots: list[int]) -> None:
        """Drops every slot but `slots`."""
        self._buffers = [(keys[slots], values[slots]) for keys, values in self._buffers]
        self.num_slots = len(slots)


def grouped_attention(
    module: Any, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **kwargs: Any
) -> tuple[Tensor, None]:
    """Attends as transformers' sdpa does, but a single new token reads each key once for the query heads that share it.

    Decoding is bound by reading keys; transformers copies them for each query head first.
    """
    num_sequences, num_heads, num_tokens, head_dim = query.shape
    if num_tokens > 1 or num_heads == key.shape[1] or kwargs.get("position_bias") is not None:
        return sdpa_attention_forward(module, query, key, value, attention_mask, **kwargs)
    group = query.view(num_sequences, key.shape[1], -1, head_dim)  # (S, n_kv, n_q / n_kv, d)
    output = F.scaled_dot_product_attention(group, key, value, attn_mask=attention_mask, scale=kwargs.get("scaling"))
    return output.reshape(num_sequences, 1, num_heads, -1), None


@dataclass
class _Answer:
    prompt: Sequence[int]
    max_new_tokens: int
    generator: torch.Generator
    ids: list[int] = field(default_factory=list)
    result: Generation | None = None


class BatchDecoder:
    """Answers prompts with a decoder stack and its head, `settings.batch_size` at a time."""

    def __init__(self, body: Any, head: Any, end_ids: frozenset[int], settings: RegenerateConfig) -> None:
        """`body` maps ids to states after the final norm, `head` those to logits; `end_ids` end an answer."""
        self._body = body
        self._head = head
        self._end_ids = end_ids
        self._settings = settings

    @torch.inference_mode()
    def run(
        self, prompts: Sequence[Sequence[int]], max_new_tokens: Sequence[int], on_tokens: Callable[[int], None]
    ) -> list[Generation]:
        """Answers each prompt with up to max_new_tokens[i] >= 1 tokens; tells `on_tokens` how many each step made.

        An answer does not depend on its batch mates, but for rounding: sampling is seeded by settings.seed and the
        prompt, so equal prompts get equal answers.
        """
        answers = [
            _Answer(prompt, limit, _generator(self._settings.seed, prompt))
            for prompt, limit in zip(prompts, max_new_tokens, strict=True)
        ]
        # Neighbours in length share the batch: a step reads as many rows of every slot as the longest one needs.
        waiting = deque(sorted(answers, key=lambda answer: len(answer.prompt), reverse=True))
        capacity = max((len(answer.prompt) + answer.max_new_tokens for answer in answers), default=0)
        cache = SlotCache(min(self._settings.batch_size, len(answers)), capacity)
        slots = [self._start_next(cache, number, waiting, on_tokens) for number in range(cache.num_slots)]
        while any(slots):
            num_idle = slots.count(None)
            if num_idle >= COMPACT_SHARE * len(slots) and num_idle:  # nobody waits, or they would not be idle
                cache.keep([number for number, answer in enumerate(slots) if answer])
                slots = [answer for answer in slots if answer]
            self._step(cache, slots)
            on_tokens(len(slots) - slots.count(None))
            for number, answer in enumerate(slots):
                if answer is not None and answer.result is not None:
                    slots[number] = self._start_next(cache, number, waiting, on_tokens)
        return [answer.result for answer in answers if answer.result is not None]

    def _start_next(
        self, cache: SlotCache, number: int, waiting: deque[_Answer], on_tokens: Callable[[int], None]
    ) -> _Answer | None:
        """Prefills waiting prompts into a slot until one wants a second token; None if none does."""
        while waiting:
            answer = waiting.popleft()
            input_ids = torch.tensor(answer.prompt, device=self._head.weight.device)[None]  # (1, P)
            positions = torch.arange(input_ids.shape[1], device=input_ids.device)[None]  # (1, P)
            cache.at(slice(number, number + 1), positions, input_ids.shape[1])
            self._append([answer], self._logits(cache, input_ids, positions, None))
            on_tokens(1)
            if answer.result is None:
                return answer
        return None

    def _step(self, cache: SlotCache, slots: list[_Answer | None]) -> None:
        """Adds one token to the answer in every slot."""
        device, dtype = self._head.weight.device, self._head.weight.dtype
        last = [(answer.ids[-1], len(answer.prompt) + len(answer.ids) - 1) if answer else (0, 0) for answer in slots]
        input_ids, positions = torch.tensor(last, device=device).split(1, dim=1)  # (S, 1) each
        length = max(position for _, position in last) + 1
        hidden_rows = torch.arange(length, device=device) > positions  # (S, length)
        mask = torch.zeros(hidden_rows.shape, dtype=dtype, device=device).masked_fill_(hidden_rows, float("-inf"))
        cache.at(slice(0, cache.num_slots), positions, length)
        self._append(slots, self._logits(cache, input_ids, positions, mask[:, None, None]))  # (S, 1, 1, length)

    def _logits(self, cache: SlotCache, input_ids: Tensor, positions: Tensor, mask: Tensor | None) -> Tensor:
        output = self._body(
            input_ids=input_ids, attention_mask=mask, position_ids=positions, past_key_values=cache, use_cache=True
        )
        return self._head(output.last_hidden_state[:, -1])  # (s, V)

    def _append(self, answers: Sequence[_Answer | None], logits: Tensor) -> None:
        if self._settings.temperature == 0:
            tokens = logits.max(dim=-1).indices.tolist()  # argmax is several times slower in bf16 on a CPU
        else:
            uniforms = [torch.rand((), generator=answer.generator) if answer else torch.zeros(()) for answer in answers]
            tokens = sample(logits, self._settings, torch.stack(uniforms).to(logits.device)).tolist()
        for answer, token in zip(answers, tokens, strict=True):
            if answer is not None:
                answer.ids.append(token)
                answer.result = self._result(answer)

    def _result(self, answer: _Answer) -> Generation | None:
        """Returns the answer if it has ended."""
        finished = answer.ids[-1] in self._end_ids
        full = len(answer.ids) == answer.max_new_tokens
        if self._settings.cut_loops and not finished and (full or len(answer.ids) % LOOP_CHECK_EVERY == 0):
            end = first_occurrence_end(answer.ids)
            if end is not None:
                return Generation(answer.ids[:end], finished=False, looped=True)
        return Generation(answer.ids, finished, looped=False) if finished or full else None


def sample(logits: Tensor, settings: RegenerateConfig, uniforms: Tensor) -> Tensor:
    """Returns tokens (S,) drawn from logits (S, V) at the settings' temperature and top_p, by one uniform (S,) each."""
    probabilities = (logits.float() / settings.temperature).softmax(dim=-1)  # (S, V)
    if settings.top_p >= 1:
        cumulative = probabilities.cumsum(dim=-1)
        order = None
    else:
        probabilities, order = probabilities.sort(dim=-1, descending=True)
        cumulative = probabilities.cumsum(dim=-1)
        # The nucleus is the fewest tokens that reach top_p: those before which less than top_p was gathered.
        in_nucleus = cumulative - probabilities < settings.top_p
        cumulative = probabilities.where(in_nucleus, 0.0).cumsum(dim=-1)
    places = torch.searchsorted(cumulative, uniforms[:, None] * cumulative[:, -1:], right=True)  # (S, 1)
    # Rounding may point behind the last token that has any mass.
    places = places.clamp(max=(cumulative < cumulative[:, -1:]).sum(dim=-1, keepdim=True))
    return (places if order is None else order.gather(-1, places)).squeeze(-1)


def _generator(seed: int, prompt: Sequence[int]) -> torch.Generator:
    digest = xxhash.xxh3_64_intdigest(f"{seed} {list(prompt)}".encode())
    return torch.Generator().manual_seed(digest % 2**63)
