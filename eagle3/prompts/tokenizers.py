"""The target's tokenizer: loaded, told from others, and what its ids mean.

One file of a target is often narrower than the others: the tokens that end an answer are those of all of them.
"""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import xxhash
from transformers import AutoTokenizer, PreTrainedTokenizerBase

from eagle3.config import UserError
from eagle3.words import one_line

# Ends of a turn that some checkpoints ship without naming them; SGLang looks for them by their text.
UNNAMED_END_TOKENS = ("<|eom_id|>", "<|content_model_end_sampling|>", "<|ifm|im_end|>")


# How the names of files begin of which one is there in any form of tokenizer: fast, sentencepiece, BPE, tiktoken.
TOKENIZER_FILES = ("token", "tiktoken", "sentencepiece", "spiece", "vocab")


def load_tokenizer(path: str, trust_remote_code: bool) -> PreTrainedTokenizerBase:
    """Loads the tokenizer of a Hugging Face directory.

    Raises:
        UserError: there is no such directory, or no tokenizer in it that loads; or a slow one without
            `trust_remote_code`, which those that come as code (Kimi's) need anyway.
    """
    if not Path(path).is_dir():
        raise UserError(f"target.path must be a Hugging Face directory, got no directory at {path!r}; check the path")
    if not any(each.name.startswith(TOKENIZER_FILES) for each in Path(path).iterdir()):
        raise UserError(
            f"target.path must be a Hugging Face directory, got no tokenizer in {path!r}; check the path, or download "
            f"the model again, with all its files"
        )
    try:
        tokenizer = AutoTokenizer.from_pretrained(path, trust_remote_code=trust_remote_code)
    except PermissionError:
        raise  # it names its file
    except Exception as error:  # transformers and tokenizers raise whatever they like
        raise UserError(
            f"target.path must have a tokenizer that loads, got {path!r} ({one_line(error)}); download it again"
        ) from error
    if not tokenizer.is_fast and not trust_remote_code:
        raise UserError(
            f"tokenizer must be a fast one (tokenizer.json), got {type(tokenizer).__name__} ({path!r}); "
            f"convert it with tokenizers first, or use it as it is with target.trust_remote_code=true"
        )
    return tokenizer


def tokenizer_digest(tokenizer: PreTrainedTokenizerBase) -> str:
    """Returns the xxh3_128 hex digest of the backend tokenizer's JSON; of the vocabulary where there is none."""
    if not tokenizer.is_fast:
        added = {i: str(token) for i, token in tokenizer.added_tokens_decoder.items()}
        vocabulary = sorted((i, str(token)) for token, i in tokenizer.get_vocab().items())
        kept = [type(tokenizer).__name__, vocabulary, sorted(added.items())]
        return xxhash.xxh3_128_hexdigest(json.dumps(kept).encode())
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


def kept_token_ids(target_path: Path, tokenizer: PreTrainedTokenizerBase) -> list[int]:
    """Returns the tokens that a draft vocabulary keeps whatever their count, sorted.

    These end a turn, or stand in the chat template (tags of tools and thoughts among them), or are digits.
    """
    vocabulary = tokenizer.get_vocab()
    template = tokenizer.chat_template if isinstance(tokenizer.chat_template, str) else ""
    kept = {i for text, i in tokenizer.get_added_vocab().items() if text in template}
    # Byte-level vocabularies spell a space as one mark, SentencePiece's as another.
    kept |= {vocabulary[mark + digit] for digit in "0123456789" for mark in ("", "\u0120", "\u2581")
             if mark + digit in vocabulary}  # fmt: skip
    return sorted(kept | end_token_ids(target_path, tokenizer))


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
