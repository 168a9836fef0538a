"""Tokenizers that come as code, as Kimi's do, render and mask as the fast ones."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from eagle3.config import UserError
from eagle3.prompts.rendering import ChatRenderer
from eagle3.prompts.templates import TemplateOptions
from eagle3.prompts.tokenizers import end_token_ids, load_tokenizer, tokenizer_digest

# A byte tokenizer in the manner of Kimi's: slow, with an encode() that takes no add_special_tokens and a template of
# its own for tools.
CODE = """
import re
from transformers import PreTrainedTokenizer

class TinyTokenizer(PreTrainedTokenizer):
    vocab_files_names = {}
    model_input_names = ["input_ids", "attention_mask"]

    def __init__(self, **kwargs):
        super().__init__(**kwargs)

    @property
    def vocab_size(self):
        return 256

    def get_vocab(self):
        return {f"<0x{i:02X}>": i for i in range(256)} | dict(self.added_tokens_encoder)

    def encode(self, text, allow_special_tokens=True, **kwargs):
        if kwargs.pop("add_special_tokens", True) is not True and kwargs:
            return super().encode(text, **kwargs)
        ids, pattern = [], "|".join(map(re.escape, self.added_tokens_encoder)) or "(?!)"
        position = 0
        for match in re.finditer(pattern, text):
            ids += list(text[position:match.start()].encode())
            ids.append(self.added_tokens_encoder[match[0]])
            position = match.end()
        return ids + list(text[position:].encode())

    def decode(self, token_ids, **kwargs):
        out = b""
        for i in token_ids:
            out += bytes([i]) if i < 256 else self.added_tokens_decoder[i].content.encode()
        return out.decode("utf-8", errors="replace")

    def apply_chat_template(self, conversation, tools=None, **kwargs):
        kwargs["tools_text"] = ", ".join(t["function"]["name"] for t in tools) if tools else None
        return super().apply_chat_template(conversation, tools=None, **kwargs)

    def _tokenize(self, text, **kwargs):
        return [f"<0x{b:02X}>" for b in text.encode()]

    def _convert_token_to_id(self, token):
        return int(token[3:5], 16)

    def _convert_id_to_token(self, index):
        return f"<0x{index:02X}>"

    def save_vocabulary(self, directory, filename_prefix=None):
        return ()
"""
TEMPLATE = (
    "{% if tools_text %}<|im_system|>{{ tools_text }}<|im_end|>{% endif %}"
    "{% for message in messages %}<|im_{{ message['role'] }}|>{{ message['content'] }}<|im_end|>{% endfor %}"
    "{% if add_generation_prompt %}<|im_assistant|>{% endif %}"
)
SPECIALS = ["<|im_end|>", "<|im_user|>", "<|im_assistant|>", "<|im_system|>"]
TALK: list[dict[str, Any]] = [
    {"role": "user", "content": "Hi"},
    {"role": "assistant", "content": "\u4f60\u597d."},
    {"role": "user", "content": "Hi"},
    {"role": "assistant", "content": "Bye. "},
]


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    path = tmp_path / "target"
    path.mkdir()
    (path / "tokenization_tiny.py").write_text(CODE)
    config = {
        "auto_map": {"AutoTokenizer": ["tokenization_tiny.TinyTokenizer", None]},
        "tokenizer_class": "TinyTokenizer",
        "eos_token": "<|im_end|>",
        "chat_template": TEMPLATE,
        "added_tokens_decoder": {
            str(256 + i): {"content": text, "special": True, "normalized": False, "lstrip": False, "rstrip": False,
                           "single_word": False}
            for i, text in enumerate(SPECIALS)
        },
    }  # fmt: skip
    (path / "tokenizer_config.json").write_text(json.dumps(config))
    (path / "config.json").write_text(json.dumps({"model_type": "llama"}))
    return path


def test_code_is_run_only_when_asked(directory: Path) -> None:
    with pytest.raises(UserError, match=r"must have a tokenizer that loads|must be a fast one"):
        load_tokenizer(str(directory), trust_remote_code=False)


def test_a_tokenizer_that_comes_as_code_renders_with_an_exact_mask(directory: Path, tmp_path: Path) -> None:
    # In a process of its own: transformers keeps what it loads as code, and where, for as long as it runs.
    script = f"""
import json, sys
sys.path.insert(0, {str(Path(__file__).resolve().parent)!r})
from pathlib import Path
import test_remote_tokenizer as case
case.check(Path({str(directory)!r}))
"""
    environment = dict(os.environ, HF_MODULES_CACHE=str(tmp_path / "modules"), PYTHONPATH=os.pathsep.join(sys.path))
    ended = subprocess.run([sys.executable, "-c", script], env=environment, capture_output=True, text=True, timeout=300)
    assert ended.returncode == 0, ended.stderr


def check(directory: Path) -> None:
    """What must hold of the tokenizer above."""
    tokenizer = load_tokenizer(str(directory), trust_remote_code=True)
    assert not tokenizer.is_fast
    renderer = ChatRenderer(tokenizer, {})
    rendered = renderer.render(TALK)
    end, user, assistant, system = range(256, 260)
    hello, hi = list("\u4f60\u597d.".encode()), list(b"Hi")
    expected = [user, *hi, end, assistant, *hello, end, user, *hi, end, assistant, *b"Bye. ", end]
    assert rendered.input_ids == expected, rendered.input_ids
    supervised = [token for token, counts in zip(rendered.input_ids, rendered.loss_mask, strict=True) if counts]
    assert supervised == [*hello, end, *b"Bye. ", end]
    options = TemplateOptions(({"type": "function", "function": {"name": "add"}},))
    assert renderer.prompt_ids(TALK[:1], options) == [system, *b"add", end, user, *hi, end, assistant]
    assert end_token_ids(directory, tokenizer) == {end}
    assert len(tokenizer_digest(tokenizer)) == 32
    assert tokenizer_digest(tokenizer) == tokenizer_digest(load_tokenizer(str(directory), True))
