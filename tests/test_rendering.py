"""The mask is exactly what the assistant wrote: golden tokens per template, and one error for each way to miss."""

import json
from pathlib import Path
from typing import Any

import pytest
from family_tokenizers import family_tokenizer
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from eagle3.config import PromptsConfig, UserError
from eagle3.prompts.answers import RenderingError
from eagle3.prompts.encoding import Encoder
from eagle3.prompts.rendering import (
    ChatRenderer,
    Rendered,
    TemplateOptions,
    answer_text,
    end_token_ids,
    kept_token_ids,
    load_tokenizer,
    make_renderer,
    tokenizer_digest,
)

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
# ChatML with a place for what is done about assistant turns.
ANSWERING_TEMPLATE = (
    "{%% for message in messages %%}{%% if message['role'] != 'assistant' %%}"
    "{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>\n' }}"
    "{%% else %%}%s{%% endif %%}{%% endfor %%}"
    "{%% if add_generation_prompt %%}{{ '<|im_start|>assistant\n%s' }}{%% endif %%}"
)
HEADER, TEXT, END = "{{ '<|im_start|>assistant\n' }}", "{{ message['content'] }}", "{{ '<|im_end|>' }}"
NEWLINE = "{{ '\n' }}"  # a bare one behind a block is trimmed
TAG, UNTAG = "{% generation %}", "{% endgeneration %}"
THINK = "<think>\n</think>\n"

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


def tagged(answer: str, thought: str = "") -> ChatRenderer:
    """Returns a renderer whose template renders assistant turns by `answer`, and prompts for them with `thought`."""
    return ChatRenderer(make_tokenizer(ANSWERING_TEMPLATE % (answer, thought), CHATML_SPECIALS), {})


def pieces(tokenizer: PreTrainedTokenizerFast, rendered: Rendered) -> list[tuple[int, str]]:
    """Returns each token with its mask."""
    tokens = tokenizer.convert_ids_to_tokens(rendered.input_ids)
    return [(int(counts), str(token)) for counts, token in zip(rendered.loss_mask, tokens, strict=True)]


def written(renderer: ChatRenderer, tokenizer: PreTrainedTokenizerFast, messages: list[dict[str, str]]) -> list[str]:
    """Returns the decoded runs of the mask, in order."""
    rendered = renderer.render(messages)
    runs: list[list[int]] = []
    before = False
    for token_id, counts in zip(rendered.input_ids, rendered.loss_mask, strict=True):
        if counts and not before:
            runs.append([])
        if counts:
            runs[-1].append(token_id)
        before = counts
    return [str(tokenizer.decode(run)) for run in runs]


def masked(flag: int, *tokens: str) -> list[tuple[int, str]]:
    """Returns tokens under one mask value; a token of several letters that is no merge stands for its letters."""
    merged = {*CHATML_SPECIALS, *LLAMA3_SPECIALS, "Hi", SPACE + "Hi", "user", NEWLINES}
    return [(flag, piece) for token in tokens for piece in ([token] if token in merged else token)]


def test_smollm2_golden_tokens_and_mask() -> None:
    tokenizer = smollm2()
    talk = [{"role": "system", "content": "Hi Hi"}, *TALK]
    rendered = ChatRenderer(tokenizer, {}).render(talk)
    assert pieces(tokenizer, rendered) == [
        *masked(0, "<|im_start|>", "system", NL, "Hi", SPACE + "Hi", "<|im_end|>", NL),
        *masked(0, "<|im_start|>", "user", NL, "Hi", "<|im_end|>", NL),
        *masked(0, "<|im_start|>", "assistant", NL),
        *masked(1, "A", NEWLINES, "1", ".", "<|im_end|>"),
        *masked(0, NL),
        *masked(0, "<|im_start|>", "user", NL, "Hi", "<|im_end|>", NL),
        *masked(0, "<|im_start|>", "assistant", NL),
        *masked(1, "1", "2", SMILE, "<|im_end|>"),
        *masked(0, NL),
    ]
    # 3 specials, the 256 bytes from 0 ("." is 13, "1" 16, "A" 32, the newline 198), the merges.
    start = rendered.loss_mask.index(True)
    assert rendered.input_ids[start : start + 6] == [3 + 32, 259, 3 + 16, 3 + 13, 2, 3 + 198]


def test_llama3_golden_tokens_and_mask() -> None:
    tokenizer = make_tokenizer(LLAMA3_TEMPLATE, LLAMA3_SPECIALS)
    talk = [*TALK[:3], {"role": "assistant", "content": " \n 12 "}]
    assert pieces(tokenizer, ChatRenderer(tokenizer, {}).render(talk)) == [
        *masked(
            0, "<|begin_of_text|>", "<|start_header_id|>", "user", "<|end_header_id|>", NEWLINES, "Hi", "<|eot_id|>"
        ),
        *masked(0, "<|start_header_id|>", "assistant", "<|end_header_id|>", NEWLINES),
        *masked(1, "A", NEWLINES, "1", ".", "<|eot_id|>"),
        *masked(0, "<|start_header_id|>", "user", "<|end_header_id|>", NEWLINES, "Hi", "<|eot_id|>"),
        *masked(0, "<|start_header_id|>", "assistant", "<|end_header_id|>", NEWLINES),
        *masked(1, "1", "2", "<|eot_id|>"),
    ]


@pytest.mark.parametrize(
    "answer",
    [
        HEADER + TAG + TEXT + END + UNTAG + NEWLINE,
        HEADER + TAG + TEXT + UNTAG + END + NEWLINE,  # the end token outside
        TAG + HEADER + TEXT + END + NEWLINE + UNTAG,  # the generation prompt and the newline inside
    ],
)
def test_generation_tags_golden_tokens_and_mask(answer: str) -> None:
    tokenizer = make_tokenizer(ANSWERING_TEMPLATE % (answer, ""), CHATML_SPECIALS)
    assert pieces(tokenizer, ChatRenderer(tokenizer, {}).render(TALK)) == [
        *masked(0, "<|im_start|>", "user", NL, "Hi", "<|im_end|>", NL),
        *masked(0, "<|im_start|>", "assistant", NL),
        *masked(1, "A", NEWLINES, "1", ".", "<|im_end|>"),
        *masked(0, NL),
        *masked(0, "<|im_start|>", "user", NL, "Hi", "<|im_end|>", NL),
        *masked(0, "<|im_start|>", "assistant", NL),
        *masked(1, "1", "2", SMILE, "<|im_end|>"),
        *masked(0, NL),
    ]


def test_generation_tags_decide_where_the_generation_prompt_is_no_prefix() -> None:
    # The prompt for an answer ends in an empty thought, which earlier turns are rendered without.
    answer = HEADER + TAG + TEXT + END + UNTAG + NEWLINE
    tokenizer = make_tokenizer(ANSWERING_TEMPLATE % (answer, THINK), CHATML_SPECIALS)
    assert written(ChatRenderer(tokenizer, {}), tokenizer, TALK) == ["A\n\n1.<|im_end|>", "12\U0001f600<|im_end|>"]


@pytest.mark.parametrize(
    "answer",
    [
        "plain",
        " leading.",
        "two  spaces , and a space before a full stop .",
        "trailing \n\n",
        "H\u00e9llo \u4f60\u597d \U0001f468\u200d\U0001f469\u200d\U0001f467",
        "user\nassistant\n",
        "1234 + 5 = 1239",
        "\tdef f():\n\n\n    return 'Hi'",
    ],
)
@pytest.mark.parametrize("clean_up", [False, True])
def test_masked_ids_decode_to_the_answer_and_its_end(answer: str, clean_up: bool) -> None:
    tokenizer = smollm2(clean_up_tokenization_spaces=clean_up)
    talk = [TALK[0], {"role": "assistant", "content": answer}, *TALK[2:]]
    rendered = ChatRenderer(tokenizer, {}).render(talk)
    ids = [i for i, counts in zip(rendered.input_ids, rendered.loss_mask, strict=True) if counts]
    text = tokenizer.decode(ids, clean_up_tokenization_spaces=False)
    assert text == answer + "<|im_end|>" + "12\U0001f600<|im_end|>"


@pytest.mark.parametrize("tokenizer", [smollm2(), make_tokenizer(LLAMA3_TEMPLATE, LLAMA3_SPECIALS)])
@pytest.mark.parametrize("system", [[], [{"role": "system", "content": "Hi Hi"}], [{"role": "system", "content": ""}]])
def test_ids_are_those_of_the_tokenizers_own_chat_template(
    tokenizer: PreTrainedTokenizerFast, system: list[dict[str, str]]
) -> None:
    renderer = ChatRenderer(tokenizer, {})
    messages: list[Any] = [*system, *TALK]
    whole: Any = tokenizer.apply_chat_template(messages)
    assert renderer.render(messages).input_ids == whole["input_ids"]
    prompt: Any = tokenizer.apply_chat_template(messages[:-1], add_generation_prompt=True)
    assert renderer.prompt_ids(messages[:-1]) == prompt["input_ids"]
    assert str(tokenizer.decode(prompt["input_ids"])).endswith(("assistant\n", "assistant<|end_header_id|>\n\n"))


def test_smollm2_default_system_prompt_is_rendered_once_and_never_masked() -> None:
    tokenizer = smollm2()
    text = tokenizer.decode(ChatRenderer(tokenizer, {}).render(TALK).input_ids)
    assert text.count("You are a helpful AI assistant named SmolLM, trained by Hugging Face") == 1
    assert written(ChatRenderer(tokenizer, {}), tokenizer, TALK) == ["A\n\n1.<|im_end|>", "12\U0001f600<|im_end|>"]


@pytest.mark.parametrize("tokenizer", [smollm2(), make_tokenizer(LLAMA3_TEMPLATE, LLAMA3_SPECIALS)])
def test_prompt_ids_are_the_ids_before_each_answer(tokenizer: PreTrainedTokenizerFast) -> None:
    renderer = ChatRenderer(tokenizer, {})
    rendered = renderer.render(TALK)
    for i in (1, 3):
        prompt_ids = renderer.prompt_ids(TALK[:i])
        assert rendered.input_ids[: len(prompt_ids)] == prompt_ids
        assert rendered.loss_mask[len(prompt_ids) - 1 : len(prompt_ids) + 1] == [False, True]


def test_prompts_without_answers_have_an_empty_mask() -> None:
    rendered = ChatRenderer(smollm2(), {}).render([TALK[0], TALK[0]])
    assert len(rendered.input_ids) == len(rendered.loss_mask) > 0
    assert not any(rendered.loss_mask)


def test_template_keywords_reach_the_template_and_the_digest() -> None:
    tokenizer = make_tokenizer("{{ mood }}" + LLAMA3_TEMPLATE, LLAMA3_SPECIALS)
    plain, moody = ChatRenderer(tokenizer, {}), ChatRenderer(tokenizer, {"mood": "Hi"})
    assert moody.prompt_ids(TALK[:1]) == [tokenizer.convert_tokens_to_ids("Hi"), *plain.prompt_ids(TALK[:1])]
    assert moody.render(TALK).loss_mask == [False, *plain.render(TALK).loss_mask]
    digests = {
        plain.template_digest(),
        moody.template_digest(),
        ChatRenderer(tokenizer, {"mood": "Ho"}).template_digest(),
        ChatRenderer(make_tokenizer(LLAMA3_TEMPLATE, LLAMA3_SPECIALS), {}).template_digest(),
    }
    assert len(digests) == 4
    assert {len(digest) for digest in digests} == {32}
    assert ChatRenderer(tokenizer, {"mood": "Hi"}).template_digest() == moody.template_digest()


def test_a_keyword_that_rendering_sets_itself_is_refused() -> None:
    with pytest.raises(
        UserError, match="must be the template's own, got tokenize, which rendering sets itself; remove"
    ):
        ChatRenderer(smollm2(), {"tokenize": False, "enable_thinking": True})


def test_a_tokenizer_without_a_template_is_refused() -> None:
    with pytest.raises(UserError, match="tokenizer must have a chat template, got none"):
        ChatRenderer(make_tokenizer(None, CHATML_SPECIALS), {})


def test_a_template_that_refuses_the_messages_is_named() -> None:
    template = SMOLLM2_TEMPLATE + "{{ raise_exception('roles must alternate') }}"
    renderer = ChatRenderer(make_tokenizer(template, CHATML_SPECIALS), {})
    for render in (renderer.render, renderer.prompt_ids):
        with pytest.raises(RenderingError, match=r"got the roles user, user \(roles must alternate\)"):
            render([TALK[0], TALK[0]])


@pytest.mark.parametrize("expression", ["1 + messages[0]['content']", "1 / 0", "messages[0]['content'] | int + 'x'"])
def test_a_template_whose_python_fails_is_named(expression: str) -> None:
    renderer = ChatRenderer(make_tokenizer(SMOLLM2_TEMPLATE + "{{ " + expression + " }}", CHATML_SPECIALS), {})
    with pytest.raises(RenderingError, match=r"messages must suit the chat template, got the roles user \(.+\)"):
        renderer.prompt_ids([TALK[0]])


def test_an_answer_that_the_template_rewrites_is_context() -> None:
    # Where later turns see an answer without what its prompt ended in, only the last one is as the target wrote it.
    tokenizer = make_tokenizer(ANSWERING_TEMPLATE % (HEADER + TEXT + END + NEWLINE, THINK), CHATML_SPECIALS)
    rendered = ChatRenderer(tokenizer, {}).render(TALK)
    assert rendered.num_context == 1
    assert written(ChatRenderer(tokenizer, {}), tokenizer, TALK) == ["12\U0001f600<|im_end|>"]
    text = str(tokenizer.decode(rendered.input_ids))
    history = "assistant\nA\n\n1.<|im_end|>\n<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"
    assert text.endswith(history + THINK + "12\U0001f600<|im_end|>")


def test_a_template_that_rewrites_the_question_is_an_error() -> None:
    template = ANSWERING_TEMPLATE.replace("message['content'] +", "message['content'] + (loop.last | string) +")
    renderer = ChatRenderer(make_tokenizer(template % (HEADER + TEXT + END, ""), CHATML_SPECIALS), {})
    with pytest.raises(RenderingError, match=r"render messages\[:1\] with the generation prompt as the beg") as info:
        renderer.render(TALK[:2])
    assert "HiFalse<|im_end|>" in str(info.value)
    assert "HiTrue<|im_end|>" in str(info.value)


def test_tags_around_some_answers_only_are_an_error() -> None:
    last_only = "{% if loop.last %}" + TAG + TEXT + UNTAG + "{% else %}" + TEXT + "{% endif %}"
    with pytest.raises(RenderingError, match="must mark one generation span per answer, got 1 spans for 2 answers"):
        tagged(HEADER + last_only + END + NEWLINE).render(TALK)


def test_tags_around_no_answer_are_an_error() -> None:
    with pytest.raises(RenderingError, match="must mark one generation span per answer, got 0 spans for 1 answers"):
        tagged("{% if false %}" + TAG + UNTAG + "{% endif %}" + HEADER + TEXT + END).render(TALK[:2])


def test_an_answer_whose_first_token_joins_the_prompt_is_an_error() -> None:
    # "\n" and "\n\nA" meet in "\n\n", "\n": the target is never prompted with these ids.
    with pytest.raises(RenderingError, match=r"messages\[1\] must begin at a token of its own.*prompt and '\\n\\nA'"):
        ChatRenderer(smollm2(), {}).render([TALK[0], {"role": "assistant", "content": "\n\nA"}])


def test_an_answer_without_an_end_token_is_an_error() -> None:
    with pytest.raises(RenderingError, match=r"messages\[3\] must end in a control token, got none behind '12"):
        tagged(HEADER + TEXT + "{% if not loop.last %}" + END + "{% endif %}").render(TALK)


def test_an_answer_that_spells_a_control_token_is_an_error() -> None:
    with pytest.raises(
        RenderingError, match=r"messages\[1\] must .*, got one that spells the control token '<\|im_end\|>'"
    ):
        ChatRenderer(smollm2(), {}).render([TALK[0], {"role": "assistant", "content": "a<|im_end|>b"}])


def test_an_answer_that_the_template_changes_is_an_error() -> None:
    with pytest.raises(RenderingError, match=r"messages\[1\] must decode to its text 'A\\n\\n1.', got 'a\\n\\n1.'"):
        tagged(HEADER + "{{ message['content'] | lower }}" + END).render(TALK)


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
    with pytest.raises(UserError, match=r"target\.path must have a tokenizer that loads, got '/.*' \("):
        load_tokenizer(str(tmp_path), trust_remote_code=False)


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


def test_only_the_last_answer_is_marked_where_that_is_asked_for() -> None:
    tokenizer = smollm2()
    renderer = ChatRenderer(tokenizer, {}, train_on="last")
    assert written(renderer, tokenizer, TALK) == ["12\U0001f600<|im_end|>"]
    assert renderer.render(TALK).num_context == 0
    assert renderer.render(TALK).input_ids == ChatRenderer(tokenizer, {}).render(TALK).input_ids
    assert not any(renderer.render(TALK[:1]).loss_mask)


def test_a_template_of_the_config_replaces_the_tokenizers(tmp_path: Path) -> None:
    path = tmp_path / "mine.jinja"
    path.write_text(LLAMA3_TEMPLATE)
    tokenizer = make_tokenizer(SMOLLM2_TEMPLATE, LLAMA3_SPECIALS)
    config = PromptsConfig(chat_template=str(path), train_on="last", chat_template_kwargs={"mood": "Hi"})
    renderer = make_renderer(tokenizer, config)
    expected = ChatRenderer(make_tokenizer(LLAMA3_TEMPLATE, LLAMA3_SPECIALS), {"mood": "Hi"}, train_on="last")
    assert renderer.render(TALK) == expected.render(TALK)
    assert renderer.template_digest() == expected.template_digest()
    path.write_bytes(b"\xff")
    with pytest.raises(UserError, match=r"prompts\.chat_template must be text in UTF-8, got .*mine\.jinja"):
        make_renderer(tokenizer, config)


def test_what_a_row_brings_wins_over_the_config() -> None:
    tokenizer = make_tokenizer("{{ mood }}" + LLAMA3_TEMPLATE, LLAMA3_SPECIALS)
    renderer = ChatRenderer(tokenizer, {"mood": "Ho"})
    options = TemplateOptions(kwargs={"mood": "Hi"})
    assert renderer.prompt_ids(TALK[:1], options) == ChatRenderer(tokenizer, {"mood": "Hi"}).prompt_ids(TALK[:1])


def test_what_another_call_left_in_the_tokenizer_changes_no_id() -> None:
    tokenizer = smollm2()
    renderer = ChatRenderer(tokenizer, {})
    expected = renderer.prompt_ids(TALK[:1])
    tokenizer.pad_token = "<|im_end|>"
    tokenizer(["Hi", "Hi Hi"], padding="max_length", truncation=True, max_length=2)
    fresh = ChatRenderer(tokenizer, {})
    tokenizer(["Hi", "Hi Hi"], padding="max_length", truncation=True, max_length=2)
    assert fresh.prompt_ids(TALK[:1]) == expected


def test_pieces_are_the_whole_for_tokenizers_that_cut_at_added_tokens_and_for_others() -> None:
    plain = make_tokenizer(SMOLLM2_TEMPLATE, CHATML_SPECIALS)
    spaced = make_tokenizer(SMOLLM2_TEMPLATE, CHATML_SPECIALS)
    # This one puts a space before the first word of a text, and so of each piece.
    spaced.backend_tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=True)
    text = "Hi<|im_start|>user\n Hi<|im_end|>\n\n\nHi <|im_end|><|im_start|>"
    for tokenizer in (plain, spaced):
        assert Encoder(tokenizer).encode(text).ids == tokenizer(text, add_special_tokens=False)["input_ids"]
