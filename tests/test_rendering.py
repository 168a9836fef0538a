"""The mask is exactly what the assistant wrote: golden tokens per template, and one error for each way to miss."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from byte_tokenizers import (
    CHATML_SPECIALS,
    LLAMA3_SPECIALS,
    LLAMA3_TEMPLATE,
    NEWLINES,
    NL,
    SMILE,
    SMOLLM2_TEMPLATE,
    SPACE,
    TALK,
    make_tokenizer,
    smollm2,
)
from tokenizers import pre_tokenizers
from transformers import PreTrainedTokenizerFast

from eagle3.config import PromptsConfig, UserError
from eagle3.prompts.answers import RenderingError
from eagle3.prompts.encoding import Encoder
from eagle3.prompts.rendering import ChatRenderer, Rendered, make_renderer
from eagle3.prompts.templates import TemplateOptions

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


def tagged(answer: str, thought: str = "") -> ChatRenderer:
    """Returns a renderer whose template renders assistant turns by `answer`, and prompts for them with `thought`."""
    return ChatRenderer(make_tokenizer(ANSWERING_TEMPLATE % (answer, thought), CHATML_SPECIALS), {})


def pieces(tokenizer: PreTrainedTokenizerFast, rendered: Rendered) -> list[tuple[int, str]]:
    """Returns each token with its mask."""
    tokens = tokenizer.convert_ids_to_tokens(rendered.input_ids)
    return [(int(counts), str(token)) for counts, token in zip(rendered.loss_mask, tokens, strict=True)]


def written(
    renderer: ChatRenderer, tokenizer: PreTrainedTokenizerFast, messages: Sequence[dict[str, Any]]
) -> list[str]:
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


def test_a_template_that_jinja_does_not_read_is_named() -> None:
    said = r"chat template must be one that Jinja reads, got unexpected '\}' \(line 2 of it\); correct it"
    with pytest.raises(UserError, match=said):
        ChatRenderer(make_tokenizer("a\n{% for m in messages %}{{ m.content }", CHATML_SPECIALS), {})


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


def test_tags_mark_what_servers_try_where_a_template_cannot_read_the_first_request() -> None:
    # As DeepSeek's: it adds arguments to a string, and reads them as text only.
    called = "{{ 'call ' + message['tool_calls'][0]['function']['name'] + ' ' + "
    called += "message['tool_calls'][0]['function']['arguments'] }}"
    renderer = tagged(HEADER + TAG + called + END + UNTAG + NEWLINE)
    call = {"id": "a", "type": "function", "function": {"name": "f", "arguments": {"a": 1}}}
    talk: list[dict[str, Any]] = [TALK[0], {"role": "assistant", "content": "", "tool_calls": [call]}]
    tokenizer = make_tokenizer(None, CHATML_SPECIALS)
    assert written(renderer, tokenizer, talk) == ['call f {"a": 1}<|im_end|>']


def test_a_tagged_template_that_never_renders_twice_the_same_is_an_error() -> None:
    renderer = tagged("{{ range(100000) | random }}" + HEADER + TAG + TEXT + END + UNTAG + NEWLINE)
    with pytest.raises(
        RenderingError, match=r"chat template must render the same text again, got .*: it writes the time"
    ):
        renderer.render(TALK)


def test_tags_around_some_answers_only_are_an_error() -> None:
    last_only = "{% if loop.last %}" + TAG + TEXT + UNTAG + "{% else %}" + TEXT + "{% endif %}"
    with pytest.raises(RenderingError, match="must mark one generation span per answer, got 1 span for 2 answers"):
        tagged(HEADER + last_only + END + NEWLINE).render(TALK)


def test_tags_around_no_answer_are_an_error() -> None:
    with pytest.raises(RenderingError, match="must mark one generation span per answer, got 0 spans for 1 answer"):
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


def test_only_the_last_answer_is_marked_where_that_is_asked_for() -> None:
    tokenizer = smollm2()
    renderer = ChatRenderer(tokenizer, {}, train_on="last")
    assert written(renderer, tokenizer, TALK) == ["12\U0001f600<|im_end|>"]
    assert renderer.render(TALK).num_context == 0
    assert renderer.render(TALK).input_ids == ChatRenderer(tokenizer, {}).render(TALK).input_ids
    assert not any(renderer.render(TALK[:1]).loss_mask)


def test_an_answer_of_weight_zero_is_read_and_not_learnt_from() -> None:
    tokenizer = smollm2()
    renderer = ChatRenderer(tokenizer, {})
    whole = renderer.render(TALK)
    for unwanted, left in ((1, ["12\U0001f600<|im_end|>"]), (3, ["A\n\n1.<|im_end|>"])):
        talk: list[dict[str, Any]] = [
            {**message, "weight": 0} if i == unwanted else message for i, message in enumerate(TALK)
        ]
        assert written(renderer, tokenizer, talk) == left
        assert renderer.render(talk).input_ids == whole.input_ids
        assert renderer.render(talk).num_context == 0
    assert not any(ChatRenderer(tokenizer, {}, train_on="last").render(talk).loss_mask)
    # A template that writes out all that a message has does not see it: a server would not either.
    listing = make_tokenizer("{{ messages | tojson }}<|im_end|>", CHATML_SPECIALS)
    assert ChatRenderer(listing, {}).prompt_ids(talk) == ChatRenderer(listing, {}).prompt_ids(TALK)


def test_a_template_of_the_config_replaces_the_tokenizers(tmp_path: Path) -> None:
    path = tmp_path / "mine.jinja"
    path.write_text(LLAMA3_TEMPLATE)
    tokenizer = make_tokenizer(SMOLLM2_TEMPLATE, LLAMA3_SPECIALS)
    config = PromptsConfig(chat_template=str(path), train_on="last", chat_template_kwargs={"mood": "Hi"})
    renderer = make_renderer(tokenizer, config)
    expected = ChatRenderer(make_tokenizer(LLAMA3_TEMPLATE, LLAMA3_SPECIALS), {"mood": "Hi"}, train_on="last")
    assert renderer.render(TALK) == expected.render(TALK)
    assert renderer.template_digest() == expected.template_digest()
    for nothing in (tmp_path, tmp_path / "none", path / "below"):
        with pytest.raises(UserError, match=rf"prompts\.chat_template must be a file, got none at '{nothing}'; check"):
            make_renderer(tokenizer, PromptsConfig(chat_template=str(nothing)))
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
