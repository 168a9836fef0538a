"""Byte-level tokenizers with a handful of merges, made here: every token of a golden row can be read."""

from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

SMOLLM2_TEMPLATE = (
    "{% for message in messages %}{% if loop.first and messages[0]['role'] != 'system' %}"
    "{{ '<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by Hugging Face<|im_end|>\n' }}"
    "{% endif %}{{'<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n'}}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
LLAMA3_TEMPLATE = (
    "{% for message in messages %}{% set content = '<|start_header_id|>' + message['role'] + '<|end_header_id|>\n\n'"
    "+ message['content'] | trim + '<|eot_id|>' %}"
    "{% if loop.index0 == 0 %}{% set content = bos_token + content %}{% endif %}{{ content }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|start_header_id|>assistant<|end_header_id|>\n\n' }}{% endif %}"
)
# Llama 3's and its successors' way to cut text before the merges: newlines stay together.
LLAMA3_REGEX = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
# How byte-level vocabularies spell a newline, two, a space, and the four bytes of the emoji below.
NL, NEWLINES, SPACE, SMILE = "\u010a", "\u010a\u010a", "\u0120", "\u00f0\u0141\u013a\u0122"

CHATML_SPECIALS = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
LLAMA3_SPECIALS = ["<|begin_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"]

TALK = [
    {"role": "user", "content": "Hi"},
    {"role": "assistant", "content": "A\n\n1."},
    {"role": "user", "content": "Hi"},
    {"role": "assistant", "content": "12\U0001f600"},
]


def make_tokenizer(template: str | None, specials: list[str], **settings: Any) -> PreTrainedTokenizerFast:
    """Returns a byte-level BPE tokenizer with merges for 'Hi', 'user' and two newlines, cutting as its model does."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    merges = [(NL, NL), ("H", "i"), ("u", "s"), ("e", "r"), ("us", "er"), (SPACE, "Hi")]
    vocab = {token: i for i, token in enumerate([*specials, *alphabet, *("".join(pair) for pair in merges)])}
    backend = Tokenizer(models.BPE(vocab, merges))
    smollm2_cuts = [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    llama3_cuts = [
        pre_tokenizers.Split(Regex(LLAMA3_REGEX), "isolated"),
        pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
    ]
    backend.pre_tokenizer = pre_tokenizers.Sequence(llama3_cuts if specials == LLAMA3_SPECIALS else smollm2_cuts)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in specials])
    return PreTrainedTokenizerFast(
        tokenizer_object=backend, bos_token=specials[0], eos_token=specials[-1], chat_template=template, **settings
    )


def smollm2(**settings: Any) -> PreTrainedTokenizerFast:
    return make_tokenizer(SMOLLM2_TEMPLATE, CHATML_SPECIALS, **settings)
