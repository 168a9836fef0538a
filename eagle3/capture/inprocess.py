"""Embedded default: the target in this process, through transformers.

States are taken from the inputs of the decoder layers, so `capture_layers` are boundaries as they stand: k is the
residual stream that enters layer k.
"""

from collections.abc import Callable, Generator, Iterable, Sequence
from itertools import islice
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedTokenizerBase
from transformers.masking_utils import sdpa_mask

from eagle3.capture.engine import Captured, EngineFacts, TopTwo
from eagle3.capture.generation import BatchDecoder, Generation, grouped_attention
from eagle3.config import RegenerateConfig, TargetConfig, UserError
from eagle3.draft.whole_target import load_whole_target
from eagle3.prompts.tokenizers import end_token_ids

ATTENTION_NAME = "eagle3_grouped"
LOGITS_PER_CHUNK = 2**24  # 64 MiB in fp32: little beside a target's head
DECODABLE_LAYERS = {"full_attention", "sliding_attention"}
WINDOW = 128  # sequences that are sorted by length together, so that batches have little padding


class TransformersEngine:
    """Runs the target on one device: captures states, generates answers."""

    def __init__(
        self,
        target: TargetConfig,
        capture_layers: Sequence[int],
        tokenizer: PreTrainedTokenizerBase,
        *,
        batch_tokens: int = 8192,
    ) -> None:
        """Loads the target; `batch_tokens` are padded tokens per forward of `capture_each`.

        Raises:
            UserError: transformers cannot load it.
        """
        model = load_whole_target(target, advice="use an engine that knows the model")
        if model.config._attn_implementation == "sdpa":
            AttentionInterface.register(ATTENTION_NAME, grouped_attention)
            AttentionMaskInterface.register(ATTENTION_NAME, sdpa_mask)
            model.set_attn_implementation(ATTENTION_NAME)
        self.model = model.eval()
        self.tokenizer = tokenizer
        self.capture_layers = list(capture_layers)
        self._batch_tokens = batch_tokens
        self._path = Path(target.path)
        self.end_ids = end_token_ids(self._path, tokenizer)
        self._text_config: Any = model.config.get_text_config()
        self._body: Any = model.get_decoder()
        self._head: Any = model.get_output_embeddings()

    @property
    def facts(self) -> EngineFacts:
        """What runs the target."""
        return EngineFacts(transformers.__version__, str(self.model.dtype).removeprefix("torch."))

    @property
    def max_tokens(self) -> int:
        """Tokens of the longest sequence that the target was made for."""
        return int(self._text_config.max_position_embeddings)

    @property
    def staging(self) -> None:
        """States go from hand to hand."""

    def num_answers_together(self, settings: RegenerateConfig) -> int:
        """Returns how many prompts are answered at the same time."""
        return settings.batch_size

    @torch.inference_mode()
    def capture(self, sequences: Sequence[Sequence[int]]) -> list[Captured]:
        """Runs sequences as one batch and returns their states.

        Raises:
            UserError: a sequence is longer than the target's positions reach.
        """
        lengths = [len(sequence) for sequence in sequences]
        self._check_length(max(lengths))
        input_ids = _pad(sequences)  # (B, T)
        device, hidden_size = self.model.device, self._text_config.hidden_size
        num_aux = len(self.capture_layers)
        aux = torch.empty(*input_ids.shape, num_aux, hidden_size, dtype=self.model.dtype, device=device)  # (B, T, A, D)
        handles = [
            self._body.layers[layer].register_forward_pre_hook(_copy_input_to(aux[:, :, i]), with_kwargs=True)
            for i, layer in enumerate(self.capture_layers)
        ]
        try:
            last = self._body(input_ids=input_ids.to(device), use_cache=False).last_hidden_state  # (B, T, D)
        finally:
            for handle in handles:
                handle.remove()
        return [Captured(aux[i, :length].flatten(1).cpu(), last[i, :length].cpu()) for i, length in enumerate(lengths)]

    def capture_each(self, sequences: Iterable[Sequence[int]]) -> Generator[tuple[int, Captured], None, None]:
        """Runs sequences in batches of similar length; yields (its place, states).

        Raises:
            UserError: a sequence is longer than the target's positions reach.
        """
        waiting = iter(enumerate(sequences))
        while window := list(islice(waiting, WINDOW)):
            for batch in batches_by_length([len(sequence) for _, sequence in window], self._batch_tokens):
                captured = self.capture([window[i][1] for i in batch])
                yield from zip([window[i][0] for i in batch], captured, strict=True)

    @torch.inference_mode()
    def log_normaliser(self, last_hidden_states: Tensor) -> Tensor:  # (R, D) -> (R,) fp32
        """Returns the log-sum-exp over V of the target's logits, a few rows at a time."""
        num_rows = max(1, LOGITS_PER_CHUNK // self._head.weight.shape[0])
        chunks = [
            self._head(rows.to(self.model.device)).float().logsumexp(dim=-1).cpu()
            for rows in last_hidden_states.split(num_rows)
        ]
        return torch.cat(chunks)

    @torch.inference_mode()
    def logits(self, sequences: Sequence[Sequence[int]]) -> list[Tensor]:
        """Returns transformers' own logits, (T, V) of each sequence, run as one batch: for gates."""
        logits = self.model(_pad(sequences).to(self.model.device), use_cache=False).logits  # (B, T, V)
        return [logits[i, : len(sequence)].cpu() for i, sequence in enumerate(sequences)]

    def plain_tokens_per_second(self, sequences: Sequence[Sequence[int]]) -> None:
        """Returns None: copying states takes no time beside a forward in this process."""

    def top_two(self, sequences: Sequence[Sequence[int]], *, together: bool) -> list[TopTwo]:
        """Returns the likeliest tokens at each position, run alone or as one batch: for gates."""
        logits = self.logits(sequences) if together else [self.logits([sequence])[0] for sequence in sequences]
        tops = [each.float().log_softmax(dim=-1).topk(2, dim=-1) for each in logits]  # (T, 2)
        return [TopTwo(top.indices, top.values) for top in tops]

    @torch.inference_mode()
    def hidden_states(self, sequence: Sequence[int]) -> list[Tensor]:
        """Returns transformers' own `hidden_states`, L+1 of (T, D), of one sequence: for gates."""
        output = self._body(_pad([sequence]).to(self.model.device), use_cache=False, output_hidden_states=True)
        return [states[0].cpu() for states in output.hidden_states]

    def generate(
        self,
        prompts: Sequence[Sequence[int]],
        settings: RegenerateConfig,
        *,
        max_tokens: int | None = None,
        on_tokens: Callable[[int], None] = lambda num_tokens: None,
    ) -> list[Generation]:
        """Answers each prompt; prompt and answer together have at most `max_tokens` (and the target's limit).

        Raises:
            UserError: a prompt leaves no room for an answer, or the target cannot be decoded here.
        """
        limit = min(self.max_tokens, max_tokens or self.max_tokens)
        longest = max((len(prompt) for prompt in prompts), default=0)
        self._check_length(longest + 1)
        assert longest < limit, f"prompts must have fewer than max_tokens={limit} tokens, got {longest}"
        self._check_decodable(min(limit, longest + settings.max_new_tokens))
        room = [min(settings.max_new_tokens, limit - len(prompt)) for prompt in prompts]
        return BatchDecoder(self._body, self._head, self.end_ids, settings).run(prompts, room, on_tokens)

    def _check_length(self, num_tokens: int) -> None:
        if num_tokens > self.max_tokens:
            raise UserError(
                f"sequences must have at most the target's max_position_embeddings={self.max_tokens} tokens, "
                f"got {num_tokens} ({self._path}); lower prompts.max_tokens"
            )

    def _check_decodable(self, num_tokens: int) -> None:
        """Refuses layers that do not keep one key per token, and windows that `num_tokens` outgrow."""
        layer_types = set(getattr(self._text_config, "layer_types", None) or {"full_attention"})
        window = getattr(self._text_config, "sliding_window", None)
        advice = "set regenerate.enabled=false to keep the answers of the prompts file, or use an engine that can"
        if layer_types - DECODABLE_LAYERS:
            raise UserError(
                f"layers of the target must be of the types {sorted(DECODABLE_LAYERS)} to generate in this process, "
                f"got {sorted(layer_types - DECODABLE_LAYERS)} ({self._path}); {advice}"
            )
        if "sliding_attention" in layer_types and window is not None and num_tokens > window:
            raise UserError(
                f"prompt and answer must fit the target's attention window of {window} tokens to generate in this "
                f"process, got {num_tokens} ({self._path}); {advice}"
            )


def batches_by_length(lengths: Sequence[int], batch_tokens: int) -> list[list[int]]:
    """Groups indices, longest first, so that each batch has at most `batch_tokens` tokens with its padding.

    A sequence that is longer than that gets a batch of its own.
    """
    batches: list[list[int]] = []
    for i in sorted(range(len(lengths)), key=lambda i: -lengths[i]):
        if batches and lengths[batches[-1][0]] * (len(batches[-1]) + 1) <= batch_tokens:
            batches[-1].append(i)
        else:
            batches.append([i])
    return batches


def _pad(sequences: Sequence[Sequence[int]]) -> Tensor:
    """Returns ids (B, T) that need no mask: padding stands to the right, where causal attention does not look."""
    input_ids = torch.zeros(len(sequences), max(map(len, sequences)), dtype=torch.int64)  # (B, T)
    for row, sequence in zip(input_ids, sequences, strict=True):
        row[: len(sequence)] = torch.tensor(sequence)
    return input_ids


def _copy_input_to(target: Tensor) -> Callable[..., None]:  # (B, T, D)
    def copy(_module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        target.copy_(args[0] if args else kwargs["hidden_states"])

    return copy
