"""The target in this process: cached forwards, captured states, greedy tokens.

The cache is addressed by position, not appended to: a rejected draft token is masked until the next forward overwrites
it, so nothing is cropped and sequences of one batch may be at different lengths.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase
from transformers.cache_utils import Cache

from eagle3.config import TargetConfig, UserError
from eagle3.draft.whole_target import load_whole_target
from eagle3.features.record import FeatureSample, supervised_rows
from eagle3.prompts.tokenizers import end_token_ids


class SlotCache(Cache):
    """Keys and values of every layer; row j of slot s holds token j of the sequence that has the slot."""

    def __init__(self, num_slots: int, capacity: int) -> None:
        super().__init__(layers=[])
        self.num_slots = num_slots
        self._capacity = capacity  # tokens of a slot
        self._buffers: list[tuple[Tensor, Tensor]] = []  # per layer (S, capacity, n_kv, d), keys and values
        self._slots = slice(0)  # of this forward, s of them
        self._rows = torch.empty(0, dtype=torch.int64)  # (s*n,) where its tokens go, in buffers of (S * capacity) rows
        self._length = 0  # tokens that it may read

    def place(self, slots: slice, positions: Tensor, length: int) -> None:
        """Says where the next forward's tokens lie: `slots` at positions (s, n), all below `length`."""
        first_rows = torch.arange(self.num_slots, device=positions.device)[slots] * self._capacity  # (s,)
        self._slots = slots
        self._rows = (first_rows[:, None] + positions).flatten()
        self._length = length

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """Stores a layer's keys and values (s, n_kv, n, d); returns those of its slots (s, n_kv, length, d)."""
        if layer_idx == len(self._buffers):
            # Zeros, since a masked row still takes part in the product and must be finite.
            self._buffers.append((self._zeros_like(key_states), self._zeros_like(value_states)))
        keys, values = self._buffers[layer_idx]
        keys.flatten(0, 1).index_copy_(0, self._rows, key_states.transpose(1, 2).flatten(0, 1))
        values.flatten(0, 1).index_copy_(0, self._rows, value_states.transpose(1, 2).flatten(0, 1))
        slots, length = self._slots, self._length
        return keys[slots, :length].transpose(1, 2), values[slots, :length].transpose(1, 2)

    def keep(self, slots: Tensor) -> None:
        """Drops every slot but `slots` (N,)."""
        self._buffers = [(keys[slots], values[slots]) for keys, values in self._buffers]
        self.num_slots = slots.numel()

    def _zeros_like(self, states: Tensor) -> Tensor:
        return states.new_zeros(self.num_slots, self._capacity, states.shape[1], states.shape[3])


class LocalTarget:
    """A causal language model of transformers, with the states that enter `capture_layers` recorded."""

    def __init__(self, model: PreTrainedModel, capture_layers: Sequence[int], end_ids: frozenset[int]) -> None:
        """`end_ids` are the tokens that end an answer."""
        self.model = model.eval()
        self.end_ids = end_ids
        self.device: torch.device = model.device
        self.dtype = model.dtype
        # What transformers returns here is untyped, and differs by model class.
        embedding: Any = model.get_input_embeddings()
        self.embed_tokens: Tensor = embedding.weight.detach()  # (V, D)
        self._body: Any = model.get_decoder()
        self._head: Any = model.get_output_embeddings()
        self._window = attention_window(model.config.get_text_config().to_dict())
        self._captured: dict[int, Tensor] = {}
        self._capture_layers = list(capture_layers)
        for boundary in self._capture_layers:
            self._body.layers[boundary].register_forward_pre_hook(self._recorder(boundary), with_kwargs=True)

    def start(self, num_slots: int, capacity: int) -> SlotCache:
        """Returns an empty cache for `num_slots` sequences of up to `capacity` tokens.

        Raises:
            UserError: the target has an attention window that such sequences outgrow.
        """
        if self._window is not None and capacity > self._window:
            raise UserError(
                f"sequences must fit the target's attention window of {self._window} tokens to be decoded in this "
                f"process, got {capacity}; lower max_new_tokens or prompts.max_tokens, or evaluate a server"
            )
        return SlotCache(num_slots, capacity)

    def forward(self, cache: SlotCache, slots: slice, input_ids: Tensor, positions: Tensor, length: int) -> Tensor:
        """Returns the states after the final norm (s, n, D) of input_ids at positions (s, n), all below `length`."""
        cache.place(slots, positions, length)
        visible = torch.arange(length, device=self.device) <= positions[..., None]  # (s, n, length)
        mask = torch.zeros(visible.shape, dtype=self.dtype, device=self.device).masked_fill_(~visible, float("-inf"))
        output = self._body(
            input_ids=input_ids,
            attention_mask=mask[:, None],  # (s, 1, n, length)
            position_ids=positions,
            past_key_values=cache,
            use_cache=True,
        )
        return output.last_hidden_state

    def prefill(self, cache: SlotCache, slot: int, token_ids: list[int]) -> Tensor:
        """Reads a sequence into a slot; returns its states after the final norm (1, n, D)."""
        input_ids = torch.tensor([token_ids], device=self.device)
        positions = torch.arange(len(token_ids), device=self.device)[None]
        return self.forward(cache, slice(slot, slot + 1), input_ids, positions, len(token_ids))

    def captured(self) -> Tensor:
        """Returns the captured states (s, n, A*D) of the latest forward."""
        return torch.cat([self._captured[boundary] for boundary in self._capture_layers], dim=-1)

    def greedy(self, last_hidden_states: Tensor) -> Tensor:
        """Returns the most likely next tokens (...) after states (..., D)."""
        # torch's argmax is several times slower than its max in bf16 on a CPU.
        return self._head(last_hidden_states).max(dim=-1).indices

    @torch.inference_mode()
    def features(self, sample_id: str, prompt_ids: list[int], answer_ids: list[int]) -> FeatureSample:
        """Returns prompt and answer as a captured sample, by one forward of its own."""
        input_ids = torch.tensor(prompt_ids + answer_ids)
        loss_mask = torch.arange(input_ids.numel()) >= len(prompt_ids)
        last = self.prefill(self.start(1, input_ids.numel()), 0, prompt_ids + answer_ids)  # (1, T, D)
        rows = supervised_rows(loss_mask)
        return FeatureSample(
            sample_id=sample_id,
            input_ids=input_ids.to(torch.int32),
            loss_mask=loss_mask,
            aux_hidden_states=self.captured()[0].cpu(),
            last_hidden_states=last[0, rows.to(self.device)].cpu(),
            last_rows=rows,
        )

    def _recorder(self, boundary: int) -> Any:
        def record(_module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            self._captured[boundary] = args[0] if args else kwargs["hidden_states"]

        return record


def load_local_target(
    config: TargetConfig, capture_layers: Sequence[int], tokenizer: PreTrainedTokenizerBase
) -> LocalTarget:
    """Loads the target from its directory onto its device.

    Raises:
        UserError: transformers cannot load it.
    """
    model = load_whole_target(config, advice="serve the model with SGLang and pass --server URL")
    return LocalTarget(model, capture_layers, end_token_ids(Path(config.path), tokenizer))


def attention_window(text_config: dict[str, Any]) -> int | None:
    """Returns how many tokens the narrowest layer attends to, None when every layer attends to all.

    Raises:
        UserError: a layer is neither full nor sliding attention, and cannot be rolled back to a position.
    """
    layer_types = set(text_config.get("layer_types") or ())
    unknown = sorted(layer_types - {"full_attention", "sliding_attention"})
    if unknown:
        raise UserError(
            f"layers of the target must attend to all earlier tokens or to a window to be decoded in this process, "
            f"got {unknown}; serve the target with SGLang and pass --server URL"
        )
    if layer_types == {"full_attention"}:
        return None
    return text_config.get("sliding_window")
