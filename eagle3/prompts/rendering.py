"""Chat template -> ids and mask, token-exact.

The whole conversation is encoded once. Encoding prefixes apart and joining them moves token borders, so prefixes are
encoded only to check that their ids are the beginning of the whole.
"""

import json
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import xxhash
from transformers import AutoTokenizer, PreTrainedTokenizerBase

from eagle3.config import UserError

# What the renderer passes to apply_chat_template itself.
RESERVED_TEMPLATE_KWARGS = (
    "add_generation_prompt",
    "chat_template",
    "continue_final_message",
    "conversation",
    "return_assistant_tokens_mask",
    "return_dict",
    "tokenize",
)

# Ends of a turn that some checkpoints ship without naming them; SGLang looks for them by their text.
UNNAMED_END_TOKENS = ("<|eom_id|>", "<|content_model_end_sampling|>", "<|ifm|im_end|>")


class RenderingError(ValueError):
    """This conversation cannot be rendered with an exact mask; others of the same file may be."""


@dataclass(frozen=True)
class Rendered:
    """One conversation as the target reads it."""

    input_ids: list[int]  # (T,)
    loss_mask: list[bool]  # (T,) True on each answer's text and its end-of-turn token


class ChatRenderer:
    """Renders messages as the target's server does, and marks what the assistant wrote."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, chat_template_kwargs: dict[str, Any]) -> None:
        """`chat_template_kwargs` reach the template as they are, e.g. enable_thinking.

        Raises:
            UserError: the tokenizer has no chat template, or a keyword is not the template's.
        """
        reserved = sorted(set(chat_template_kwargs) & set(RESERVED_TEMPLATE_KWARGS))
        if reserved:
            raise UserError(
                f"chat_template_kwargs must be the template's own, got {', '.join(reserved)}, which rendering sets "
                f"itself; remove them"
            )
        try:
            self._template = tokenizer.get_chat_template()
        except ValueError as error:
            raise UserError(
                f"tokenizer must have a chat template, got none ({tokenizer.name_or_path!r}); "
                f"use the instruction-tuned model's tokenizer"
            ) from error
        if not isinstance(self._template, str):
            raise UserError(
                f"tokenizer must have a chat template that is text, got {self._template!r} "
                f"({tokenizer.name_or_path!r}); download it again"
            )
        self._tokenizer = tokenizer
        self._kwargs = dict(chat_template_kwargs)
        # The syntax that transformers looks for before it computes assistant masks.
        self._has_generation_tags = re.search(r"\{%-?\s*generation\s*-?%\}", self._template) is not None
        self._control_ids = {i for i, token in tokenizer.added_tokens_decoder.items() if token.special}
        self._control_ids.update(tokenizer.all_special_ids)

    def render(self, messages: Sequence[dict[str, Any]]) -> Rendered:
        """Encodes a conversation, with a mask that is all False only if it has no assistant turn.

        Raises:
            RenderingError: the template refuses the messages, or what the assistant wrote is not a run of whole tokens
                that decodes to its text and ends in a control token.
        """
        text = self._text(messages, add_generation_prompt=False)
        input_ids = self._encode(text)
        loss_mask = [False] * len(input_ids)
        answers = [i for i, message in enumerate(messages) if message["role"] == "assistant"]
        if self._has_generation_tags:
            starts = self._tagged_starts(messages, input_ids, len(answers))
        else:
            starts = [0] * len(answers)
        for i, tagged_start in zip(answers, starts, strict=True):
            # A tagged span may open with the generation prompt, which the assistant does not write.
            start = max(tagged_start, self._answer_start(messages, i, text, input_ids))
            end = self._answer_end(messages[i]["content"], i, input_ids, start)
            loss_mask[start:end] = [True] * (end - start)
        return Rendered(input_ids=input_ids, loss_mask=loss_mask)

    def prompt_ids(self, messages: Sequence[dict[str, Any]]) -> list[int]:
        """Encodes a conversation up to and including the prompt for the assistant's next answer.

        Raises:
            RenderingError: the template refuses the messages.
        """
        return self._encode(self._text(messages, add_generation_prompt=True))

    def template_digest(self) -> str:
        """Returns the xxh3_128 hex digest of the template's text and its keyword arguments."""
        return xxhash.xxh3_128_hexdigest(json.dumps([self._template, self._kwargs], sort_keys=True).encode())

    def _text(self, messages: Sequence[dict[str, Any]], *, add_generation_prompt: bool) -> str:
        try:
            return str(
                self._tokenizer.apply_chat_template(
                    list(messages), add_generation_prompt=add_generation_prompt, tokenize=False, **self._kwargs
                )
            )
        except Exception as error:  # jinja2's own, and whatever a template's expressions raise
            roles = ", ".join(message["role"] for message in messages)
            raise RenderingError(
                f"messages must suit the chat template, got the roles {roles} ({one_line(error)})"
            ) from error

    def _encode(self, text: str) -> list[int]:
        # Templates write the special tokens themselves; apply_chat_template encodes in the same way.
        return list(self._tokenizer(text, add_special_tokens=False)["input_ids"])

    def _tagged_starts(self, messages: Sequence[dict[str, Any]], input_ids: list[int], num_answers: int) -> list[int]:
        """Returns the first token of each generation-tagged span."""
        encoded: Any = self._tokenizer.apply_chat_template(
            list(messages), return_dict=True, return_assistant_tokens_mask=True, **self._kwargs
        )
        assert list(encoded["input_ids"]) == input_ids, "apply_chat_template must encode the text that it renders"
        mask = encoded["assistant_masks"]
        starts = [t for t in range(len(mask)) if mask[t] and (t == 0 or not mask[t - 1])]
        if len(starts) != num_answers:
            raise RenderingError(
                f"chat template must mark one generation span per answer, got {len(starts)} spans for "
                f"{num_answers} answers"
            )
        return starts

    def _answer_start(self, messages: Sequence[dict[str, Any]], i: int, text: str, input_ids: list[int]) -> int:
        """Returns the first token behind the generation prompt of the answer messages[i]."""
        opening = self._text(messages[:i], add_generation_prompt=True)
        if not text.startswith(opening):
            if self._has_generation_tags:
                return 0  # the tags alone say where the answer is
            raise RenderingError(
                f"chat template must render messages[:{i}] with the generation prompt as the beginning of the whole, "
                f"got {_shown(opening, text)}: it renders earlier turns differently once an answer follows"
            )
        prompt_ids = self._encode(opening)
        if input_ids[: len(prompt_ids)] != prompt_ids:
            raise RenderingError(
                f"answer messages[{i}] must begin at a token of its own, got a token that joins the generation prompt "
                f"and {messages[i]['content'][:20]!r}"
            )
        return len(prompt_ids)

    def _answer_end(self, content: str, i: int, input_ids: list[int], start: int) -> int:
        """Returns one past the end-of-turn token of the answer messages[i]."""
        end = next((t for t in range(start, len(input_ids)) if input_ids[t] in self._control_ids), None)
        if end is None:
            raise RenderingError(f"answer messages[{i}] must end in a control token, got none behind {content[-20:]!r}")
        # Many configs ask for a clean-up that turns " ." into ".", which is for display.
        written = str(self._tokenizer.decode(input_ids[start:end], clean_up_tokenization_spaces=False))
        # Templates may trim an answer, or put a space before it; the tokens between are the answer's in any case.
        if written.strip() != content.strip():
            raise RenderingError(
                f"answer messages[{i}] must decode to its text {content.strip()[:40]!r}, got {written.strip()[:40]!r}: "
                f"the template or the tokenizer changes it, or it spells a control token"
            )
        return end + 1


def load_tokenizer(path: str, trust_remote_code: bool) -> PreTrainedTokenizerBase:
    """Loads the tokenizer of a Hugging Face directory.

    Raises:
        UserError: there is no such directory, or no fast tokenizer in it.
    """
    if not Path(path).is_dir():
        raise UserError(f"target.path must be a Hugging Face directory, got no directory at {path!r}; check the path")
    try:
        tokenizer = AutoTokenizer.from_pretrained(path, trust_remote_code=trust_remote_code)
    except Exception as error:  # transformers and tokenizers raise whatever they like
        raise UserError(
            f"target.path must have a tokenizer that loads, got {path!r} ({one_line(error)}); download it again"
        ) from error
    if not tokenizer.is_fast:
        raise UserError(
            f"tokenizer must be a fast one (tokenizer.json), got {type(tokenizer).__name__} ({path!r}); "
            f"convert it with tokenizers first"
        )
    return tokenizer


def tokenizer_digest(tokenizer: PreTrainedTokenizerBase) -> str:
    """Returns the xxh3_128 hex digest of the backend tokenizer's JSON."""
    state = json.loads(tokenizer.backend_tokenizer.to_str())
    # Padding and truncation are left there by the last call, and change no id.
    state["padding"] = state["truncation"] = None
    return xxhash.xxh3_128_hexdigest(json.dumps(state, sort_keys=True).encode())


def end_token_ids(target_path: Path, tokenizer: PreTrainedTokenizerBase) -> frozenset[int]:
    """Returns the tokens that end an answer: all that the target's files name, as SGLang has it.

    One of the files is often narrower than the others; a file that is not there names none.

    Raises:
        UserError: one of the files is no JSON object.

    Source: SGLang 0.5.23, srt/managers/schedule_batch.py (`_check_token_based_finish`), srt/configs/model_config.py
    (`_get_hf_eos_token_id`) and srt/utils/hf_transformers/common.py (`attach_additional_stop_token_ids`).
    """
    config, generation_config = (_read_object(target_path / f"{name}.json") for name in ("config", "generation_config"))
    if config.get("eos_token_id") is None:
        config = config.get("text_config") or {}  # of a model with other towers
    added = tokenizer.get_added_vocab()
    found = {added[text] for text in UNNAMED_END_TOKENS if text in added}
    for ids in (config.get("eos_token_id"), generation_config.get("eos_token_id"), tokenizer.eos_token_id):
        found |= {ids} if isinstance(ids, int) else set(ids or ())
    return frozenset(found)


def answer_text(tokenizer: PreTrainedTokenizerBase, token_ids: Sequence[int], *, finished: bool) -> str:
    """Returns an answer as the history holds it: its text without the end token, if it `finished` with one.

    The template encodes the text again, so nothing else is left out or cleaned up: later turns find the answer's ids.
    """
    written = list(token_ids[:-1] if finished else token_ids)
    return str(tokenizer.decode(written, skip_special_tokens=False, clean_up_tokenization_spaces=False))


def _read_object(path: Path) -> dict[str, Any]:
    """Reads a JSON object; a file that is not there is an empty one."""
    if not path.is_file():
        return {}
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:  # not JSON, or not UTF-8
        raise UserError(f"{path.name} must be JSON, got {one_line(error)} ({path}); download it again") from error
    if not isinstance(values, dict):
        raise UserError(f"{path.name} must be an object, got a {type(values).__name__} ({path}); download it again")
    return values


def missing_weights(names: Iterable[str], path: str) -> str:
    """Says that a target lacks weights: transformers would make them up, and go on."""
    missing = sorted(names)
    return (
        f"target.path must hold every weight of the model that its config.json describes, got none for "
        f"{', '.join(missing[:3])}{f' and {len(missing) - 3} more' if len(missing) > 3 else ''} ({path!r}); "
        f"download it again"
    )


def one_line(error: Exception) -> str:
    """Returns an error of others as one line; its kind alone where it says nothing."""
    return " ".join(str(error).split())[:400] or type(error).__name__


def _shown(expected: str, text: str) -> str:
    """Shows both texts from just before the place where they part."""
    at = next(
        (j for j, (a, b) in enumerate(zip(expected, text, strict=False)) if a != b), min(len(expected), len(text))
    )
    at = max(at - 10, 0)
    return f"{text[at : at + 40]!r} instead of {expected[at : at + 40]!r}"
