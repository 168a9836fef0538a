"""Small tokenizers with the control tokens of real model families, and their chat templates.

The vocabulary is bytes and a few merges; what makes a family are its added tokens, its cuts and its template.
"""

from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

TEMPLATES = Path(__file__).resolve().parent / "chat_templates"
# Where Llama 3, Qwen 2 and later, DeepSeek and Kimi cut text before the merges: line ends stay together.
CUTS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
# DeepSeek writes its tokens with a full-width bar and a low block.
BAR, GAP = "\uff5c", "\u2581"
DEEPSEEK_CALLS = ["tool calls begin", "tool calls end", "tool call begin", "tool call end", "tool sep",
                  "tool outputs begin", "tool outputs end", "tool output begin", "tool output end"]  # fmt: skip
THINK = ["<think>", "</think>"]


def deepseek(name: str) -> str:
    """Spells one of DeepSeek's tokens."""
    return f"<{BAR}{name.replace(' ', GAP)}{BAR}>"


# Special tokens first: the beginning of the text, the end of it, and the others; then those that are text to a decoder.
FAMILIES: dict[str, tuple[list[str], list[str]]] = {
    "qwen": (
        ["<|endoftext|>", "<|im_end|>", "<|im_start|>"],
        [*THINK, "<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>"],
    ),
    "llama": (
        ["<|begin_of_text|>", "<|eot_id|>", "<|start_header_id|>", "<|end_header_id|>", "<|eom_id|>", "<|python_tag|>"],
        [],
    ),
    "deepseek": (
        [deepseek("begin of sentence"), deepseek("end of sentence")],
        [deepseek(name) for name in ("User", "Assistant", *DEEPSEEK_CALLS)] + THINK,
    ),
    "kimi": (
        ["[BOS]", "[EOS]", "<|im_end|>", "<|im_user|>", "<|im_assistant|>", "<|im_system|>", "<|im_middle|>",
         "<|tool_calls_section_begin|>", "<|tool_calls_section_end|>", "<|tool_call_begin|>",
         "<|tool_call_argument_begin|>", "<|tool_call_end|>"],
        THINK,
    ),
    "gpt-oss": (
        ["<|startoftext|>", "<|return|>", "<|start|>", "<|end|>", "<|message|>", "<|channel|>", "<|call|>",
         "<|constrain|>"],
        [],
    ),
    "gemma": (["<bos>", "<eos>", "<start_of_turn>", "<end_of_turn>"], []),
    "mistral": (
        ["<s>", "</s>", "[INST]", "[/INST]", "[SYSTEM_PROMPT]", "[/SYSTEM_PROMPT]", "[TOOL_CALLS]",
         "[AVAILABLE_TOOLS]", "[/AVAILABLE_TOOLS]", "[TOOL_RESULTS]", "[/TOOL_RESULTS]"],
        [],
    ),
}  # fmt: skip


def template_text(name: str) -> str:
    """Returns a template of tests/chat_templates."""
    return (TEMPLATES / f"{name}.jinja").read_text(encoding="utf-8")


def family_tokenizer(family: str, template: str | None, **settings: Any) -> PreTrainedTokenizerFast:
    """Returns a byte-level tokenizer with a family's added tokens."""
    specials, others = FAMILIES[family]
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    newline, space = "\u010a", "\u0120"
    merges = [(newline, newline), ("H", "i"), ("u", "s"), ("e", "r"), ("us", "er"), (space, "Hi")]
    vocab = {token: i for i, token in enumerate([*specials, *alphabet, *("".join(pair) for pair in merges)])}
    backend = Tokenizer(models.BPE(vocab, merges))
    backend.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(CUTS), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in specials])
    backend.add_tokens([AddedToken(token, special=False, normalized=False) for token in others])
    return PreTrainedTokenizerFast(
        tokenizer_object=backend, bos_token=specials[0], eos_token=specials[1], chat_template=template, **settings
    )
