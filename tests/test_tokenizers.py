"""A target's tokenizer loads or is refused by name; its digest, its end tokens and its answers are those of SGLang."""

import errno
import json
from pathlib import Path
from typing import Any

import pytest
from byte_tokenizers import CHATML_SPECIALS, LLAMA3_SPECIALS, SMOLLM2_TEMPLATE, TALK, make_tokenizer, smollm2
from family_tokenizers import family_tokenizer
from transformers import AutoTokenizer

from eagle3.config import UserError
from eagle3.prompts.rendering import ChatRenderer
from eagle3.prompts.tokenizers import answer_text, end_token_ids, kept_token_ids, load_tokenizer, tokenizer_digest


def test_tokenizers_load_from_their_directory(tmp_path: Path) -> None:
    tokenizer = smollm2()
    tokenizer.save_pretrained(tmp_path)
    loaded = load_tokenizer(str(tmp_path), trust_remote_code=False)
    assert loaded("Hi\n\n1.")["input_ids"] == tokenizer("Hi\n\n1.")["input_ids"]
    assert ChatRenderer(loaded, {}).render(TALK) == ChatRenderer(tokenizer, {}).render(TALK)
    assert tokenizer_digest(loaded) == tokenizer_digest(tokenizer)


def test_a_missing_tokenizer_directory_is_named(tmp_path: Path) -> None:
    with pytest.raises(
        UserError, match=r"target\.path must be a Hugging Face directory, got no directory at '.*/none'"
    ):
        load_tokenizer(str(tmp_path / "none"), trust_remote_code=False)


def test_a_directory_without_a_tokenizer_is_named(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama"}))
    with pytest.raises(
        UserError, match=r"target\.path must be a Hugging Face directory, got no tokenizer in '/.*'; ch"
    ):
        load_tokenizer(str(tmp_path), trust_remote_code=False)


def test_a_file_without_rights_is_the_systems_word(tiny_target: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*arguments: object, **options: object) -> None:
        raise PermissionError(errno.EACCES, "Permission denied", "config.json")

    monkeypatch.setattr(AutoTokenizer, "from_pretrained", refuse)
    with pytest.raises(PermissionError, match=r"config\.json"):
        load_tokenizer(str(tiny_target), trust_remote_code=False)


def test_a_tokenizer_that_is_none_is_one_sentence(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama"}))
    for text in ("{}", "[]", '{"version"'):
        (tmp_path / "tokenizer.json").write_text(text)
        with pytest.raises(UserError, match=r"must have a tokenizer that loads, got .*; download it again") as caught:
            load_tokenizer(str(tmp_path), trust_remote_code=False)
        assert "\n" not in str(caught.value)


def test_a_slow_tokenizer_is_refused(tmp_path: Path) -> None:
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "ByT5Tokenizer"}))
    with pytest.raises(UserError, match=r"tokenizer must be a fast one \(tokenizer\.json\), got ByT5Tokenizer"):
        load_tokenizer(str(tmp_path), trust_remote_code=False)


def test_tokenizer_digest_moves_with_the_vocabulary_alone() -> None:
    tokenizer = smollm2()
    digest = tokenizer_digest(tokenizer)
    tokenizer.pad_token = "<|im_end|>"
    tokenizer(["Hi", "Hi Hi"], padding=True, truncation=True, max_length=4)
    assert tokenizer_digest(tokenizer) == digest
    assert len(digest) == 32
    assert tokenizer_digest(make_tokenizer(None, LLAMA3_SPECIALS)) != digest


def write_end_tokens(directory: Path, **files: Any) -> Path:
    for name, values in files.items():
        (directory / f"{name}.json").write_text(json.dumps(values))
    return directory


def test_end_tokens_are_all_that_config_generation_config_and_tokenizer_name(tmp_path: Path) -> None:
    tokenizer = make_tokenizer(None, ["<|eom_id|>", *CHATML_SPECIALS])
    unnamed, end = 0, 3  # SGLang ends an answer at the first whoever names it
    assert end_token_ids(tmp_path, tokenizer) == {unnamed, end}
    write_end_tokens(tmp_path, config={"eos_token_id": None}, generation_config={"eos_token_id": [7, 8]})
    assert end_token_ids(tmp_path, tokenizer) == {unnamed, end, 7, 8}
    write_end_tokens(tmp_path, config={"eos_token_id": 9}, generation_config={"eos_token_id": 1})
    tokenizer.eos_token = None
    assert end_token_ids(tmp_path, tokenizer) == {unnamed, 1, 9}


@pytest.mark.parametrize(("text", "said"), [("{", "must be JSON, got"), ("[]", "must be an object, got a list")])
def test_a_generation_config_that_is_none_is_named(tmp_path: Path, text: str, said: str) -> None:
    (tmp_path / "generation_config.json").write_text(text)
    with pytest.raises(UserError, match=rf"generation_config.json {said}.* \(.*\); download it again"):
        end_token_ids(tmp_path, make_tokenizer(SMOLLM2_TEMPLATE, CHATML_SPECIALS))


def test_end_tokens_of_a_nested_text_config_count_where_the_whole_names_none(tmp_path: Path) -> None:
    tokenizer = make_tokenizer(None, CHATML_SPECIALS)
    nested = {"text_config": {"eos_token_id": [5, 6]}}
    assert end_token_ids(write_end_tokens(tmp_path, config=nested), tokenizer) == {2, 5, 6}
    assert end_token_ids(write_end_tokens(tmp_path, config=nested | {"eos_token_id": 4}), tokenizer) == {2, 4}


@pytest.mark.parametrize("clean_up", [False, True])
def test_the_text_of_an_answer_encodes_to_its_ids_again(clean_up: bool) -> None:
    tokenizer = smollm2(clean_up_tokenization_spaces=clean_up)
    text = "Hi , is n't it ?<|endoftext|> Hi ."
    ids = tokenizer(text, add_special_tokens=False)["input_ids"]
    end = tokenizer.eos_token_id
    assert answer_text(tokenizer, [*ids, end], finished=True) == text
    assert answer_text(tokenizer, ids, finished=False) == text
    # A token limit may cut an answer behind a control token that is not its end.
    assert answer_text(tokenizer, [*ids, 0], finished=False) == text + "<|endoftext|>"
    assert answer_text(tokenizer, [], finished=False) == ""


def test_a_draft_vocabulary_keeps_ends_template_tokens_and_digits(tmp_path: Path) -> None:
    tokenizer = family_tokenizer("qwen", "{% if tools %}<tool_call></tool_call>{% endif %}<|im_start|>")
    kept = tokenizer.convert_ids_to_tokens(kept_token_ids(tmp_path, tokenizer))
    assert set(kept) == {"<|im_start|>", "<|im_end|>", "<tool_call>", "</tool_call>", *"0123456789"}
