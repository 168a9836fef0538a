"""Real chat templates: what is supervised is what the model writes behind the prompt that its server sends.

The templates are those that packages ship, byte for byte (chat_templates/sources.json says which); Kimi K2.5's and
SmolLM2's are not among them: the first is a test template with the published behaviour, the second comes with the
model.
The tokenizers are small, with each family's added tokens. `python tests/test_templates.py` writes golden.json anew.
"""

import hashlib
import json
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import xxhash
from family_tokenizers import TEMPLATES, deepseek, family_tokenizer, template_text

from eagle3.prompts.answers import RenderingError
from eagle3.prompts.rendering import ChatRenderer, Rendered
from eagle3.prompts.templates import TemplateOptions
from eagle3.prompts.tokenizers import load_tokenizer

GOLDEN = TEMPLATES / "golden.json"
EOS = deepseek("end of sentence")
CALL = {"id": "abcdefghi", "type": "function", "function": {"name": "add", "arguments": {"a": 1, "b": "\u00e9"}}}
TOOLS = (
    {
        "type": "function",
        "function": {
            "name": "add",
            "description": "Adds.",
            "parameters": {"type": "object", "properties": {"a": {"type": "integer"}}},
        },
    },
)
CALLED = '{"a": 1, "b": "\u00e9"}'  # as transformers' tojson spells it


def user(content: str) -> dict[str, Any]:
    return {"role": "user", "content": content}


def assistant(content: str, **more: Any) -> dict[str, Any]:
    return {"role": "assistant", "content": content, **more}


RESULT = {"role": "tool", "name": "add", "tool_call_id": "abcdefghi", "content": "2"}
TALKS: dict[str, list[dict[str, Any]]] = {
    "plain": [user("Hi"), assistant("One."), user("Hi\n"), assistant("Two\n\n2.")],
    "thought": [
        user("Hi"),
        assistant("One.", reasoning_content="Hm."),
        user("Hi"),
        assistant("Two.", reasoning_content="Well,\nyes."),
    ],
    "call": [user("Hi"), assistant("", tool_calls=[CALL]), RESULT, assistant("Two.")],
    "thoughtful call": [
        user("Hi"),
        assistant("", tool_calls=[CALL], reasoning_content="Call."),
        RESULT,
        assistant("Two.", reasoning_content="Done."),
    ],
    "only a call": [user("Hi"), assistant("I ask.", tool_calls=[CALL])],
}


@dataclass(frozen=True)
class Case:
    """A template, and what must be supervised of each talk; a pattern of the refusal where nothing can be."""

    family: str
    template: str
    expected: dict[str, list[str] | str]
    kwargs: dict[str, Any] = field(default_factory=dict)


def qwen_call(before: str = "") -> str:
    return f'{before}<tool_call>\n{{"name": "add", "arguments": {CALLED}}}\n</tool_call><|im_end|>'


TWO = "Two\n\n2."
V3_CALL = (
    f"{deepseek('tool calls begin')}{deepseek('tool call begin')}function{deepseek('tool sep')}add\n```json\n"
    f"{CALLED}\n```{deepseek('tool call end')}{deepseek('tool calls end')}{EOS}"
)
V31_CALL = (
    f"{deepseek('tool calls begin')}{deepseek('tool call begin')}add{deepseek('tool sep')}{CALLED}"
    f"{deepseek('tool call end')}{deepseek('tool calls end')}{EOS}"
)


def kimi_call(call_id: str) -> str:
    return (
        f"<|tool_calls_section_begin|><|tool_call_begin|>{call_id}<|tool_call_argument_begin|>{CALLED}"
        f"<|tool_call_end|><|tool_calls_section_end|><|im_end|>"
    )


FINAL = "<|channel|>final<|message|>"
ANALYSIS = "<|channel|>analysis<|message|>"
OSS_CALL = f" to=functions.add<|channel|>commentary json<|message|>{CALLED}<|call|>"
NO_THOUGHT = r"must have a thought \(reasoning_content\), since its prompt ends in '<think>\\n', got none"

CASES: dict[str, Case] = {
    "Qwen 2.5": Case("qwen", "qwen2.5", {
        "plain": ["One.<|im_end|>", f"{TWO}<|im_end|>"],
        "thought": ["One.<|im_end|>", "Two.<|im_end|>"],  # this model has none: dropped and counted
        "call": [qwen_call(), "Two.<|im_end|>"],
        "thoughtful call": [qwen_call(), "Two.<|im_end|>"],
        "only a call": [qwen_call("I ask.\n")],
    }),
    # History is rendered without thoughts, so that earlier answers are context.
    "Qwen 3, thinking": Case("qwen", "qwen3", {
        "plain": [f"<think>\n\n</think>\n\n{TWO}<|im_end|>"],
        "thought": ["<think>\nWell,\nyes.\n</think>\n\nTwo.<|im_end|>"],
        "call": ["<think>\n\n</think>\n\nTwo.<|im_end|>"],
        "thoughtful call": [
            qwen_call("<think>\nCall.\n</think>\n\n"),
            "<think>\nDone.\n</think>\n\nTwo.<|im_end|>",
        ],
        "only a call": [qwen_call("<think>\n\n</think>\n\nI ask.\n")],
    }),
    "Qwen 3, not thinking": Case("qwen", "qwen3", {
        "plain": [f"{TWO}<|im_end|>"],
        "thought": ["Two.<|im_end|>"],
        "call": ["Two.<|im_end|>"],
        "thoughtful call": ["Two.<|im_end|>"],
        "only a call": [qwen_call("I ask.\n")],
    }, {"enable_thinking": False}),
    "Qwen 3, with generation tags": Case("qwen", "qwen3-tagged", {
        "plain": ["<think>\n\n</think>\n\nOne.<|im_end|>", f"<think>\n\n</think>\n\n{TWO}<|im_end|>"],
        "thought": ["<think>\nHm.\n</think>\n\nOne.<|im_end|>", "<think>\nWell,\nyes.\n</think>\n\nTwo.<|im_end|>"],
        "thoughtful call": [
            qwen_call("<think>\nCall.\n</think>\n\n"),
            "<think>\nDone.\n</think>\n\nTwo.<|im_end|>",
        ],
    }),
    "Llama 3.1": Case("llama", "llama3.1", {
        "plain": ["One.<|eot_id|>", f"{TWO}<|eot_id|>"],
        "thought": ["One.<|eot_id|>", "Two.<|eot_id|>"],
        "call": [f'{{"name": "add", "parameters": {CALLED}}}<|eot_id|>', "Two.<|eot_id|>"],
        "only a call": r"must decode to its text 'I ask.', got '\{\"name\": \"add\"",
    }),
    "DeepSeek V3": Case("deepseek", "deepseek-v3", {
        "plain": [f"One.{EOS}", f"{TWO}{EOS}"],
        "call": [V3_CALL, f"Two.{EOS}"],
        "only a call": [f"I ask.{V3_CALL}"],
    }),
    "DeepSeek V3.1, not thinking": Case("deepseek", "deepseek-v3.1", {
        "plain": [f"One.{EOS}", f"{TWO}{EOS}"],
        "thought": [f"One.{EOS}", f"Two.{EOS}"],
        "call": [V31_CALL, f"Two.{EOS}"],
        "only a call": [f"I ask.{V31_CALL}"],
    }),
    "DeepSeek V3.1, thinking": Case("deepseek", "deepseek-v3.1", {
        "plain": [f"</think>One.{EOS}", f"</think>{TWO}{EOS}"],
        "thought": [f"Well,\nyes.</think>Two.{EOS}"],
        "call": [f"</think>{V31_CALL}", f"Two.{EOS}"],
    }, {"thinking": True}),
    "DeepSeek R1": Case("deepseek", "deepseek-r1", {
        "plain": NO_THOUGHT,
        "thought": [f"Well,\nyes.\n</think>\n\nTwo.{EOS}"],
        "only a call": r"must be rendered with its calls, got a template that leaves out \['add'\]",
    }),
    "DeepSeek R1, with generation tags": Case("deepseek", "deepseek-r1-tagged", {
        "plain": [f"One.{EOS}", f"{TWO}{EOS}"],
        "call": [V3_CALL, f"Two.{EOS}"],
    }),
    "Kimi K2": Case("kimi", "kimi-k2", {
        "plain": ["One.<|im_end|>", f"{TWO}<|im_end|>"],
        "call": [kimi_call("functions.add:0"), "Two.<|im_end|>"],
        "only a call": [f"I ask.{kimi_call('functions.add:0')}"],
    }),
    "Kimi K2 Thinking": Case("kimi", "kimi-k2-thinking", {
        "plain": ["<think></think>One.<|im_end|>", f"<think></think>{TWO}<|im_end|>"],
        "thought": ["<think>Well,\nyes.</think>Two.<|im_end|>"],
        "call": "access to attribute 'append' of 'list' object is unsafe",  # of this copy; servers refuse it as well
    }),
    "Kimi K2.5, thinking": Case("kimi", "kimi-k2.5-test", {
        "plain": ["</think>One.<|im_end|>", f"</think>{TWO}<|im_end|>"],
        "thought": ["Well,\nyes.</think>Two.<|im_end|>"],
        "call": [f"</think>{kimi_call('abcdefghi')}", "</think>Two.<|im_end|>"],
        # The thought of the call is kept while its results come in.
        "thoughtful call": [f"Call.</think>{kimi_call('abcdefghi')}", "Done.</think>Two.<|im_end|>"],
        "only a call": [f"</think>I ask.{kimi_call('abcdefghi')}"],
    }),
    "Kimi K2.5, not thinking": Case("kimi", "kimi-k2.5-test", {
        "plain": ["One.<|im_end|>", f"{TWO}<|im_end|>"],
        "thought": ["One.<|im_end|>", "Two.<|im_end|>"],
        "call": [kimi_call("abcdefghi"), "Two.<|im_end|>"],
    }, {"thinking": False}),
    # An answer ends in <|return|> when it is written and in <|end|> when it is read again.
    "gpt-oss": Case("gpt-oss", "gpt-oss", {
        "plain": [f"{FINAL}{TWO}<|return|>"],
        "thought": [f"{ANALYSIS}Well,\nyes.<|end|><|start|>assistant{FINAL}Two.<|return|>"],
        "call": [OSS_CALL, f"{FINAL}Two.<|return|>"],
        "thoughtful call": [
            f"{ANALYSIS}Call.<|end|><|start|>assistant{OSS_CALL}",
            f"{ANALYSIS}Done.<|end|><|start|>assistant{FINAL}Two.<|return|>",
        ],
    }),
    "gpt-oss, with generation tags": Case("gpt-oss", "gpt-oss-tagged", {
        "plain": [f"{FINAL}One.<|end|>", f"{FINAL}{TWO}<|return|>"],
        "thought": [
            f"{FINAL}One.<|end|>",
            f"{ANALYSIS}Well,\nyes.<|end|><|start|>assistant{FINAL}Two.<|return|>",
        ],
        "call": [OSS_CALL, f"{FINAL}Two.<|return|>"],
    }),
    "Gemma 3": Case("gemma", "gemma3", {
        "plain": ["One.<end_of_turn>", f"{TWO}<end_of_turn>"],
        "call": "Conversation roles must alternate",
        "only a call": r"must be rendered with its calls, got a template that leaves out \['add'\]",
    }),
    "Mistral Nemo": Case("mistral", "mistral-nemo", {
        "plain": ["One.</s>", f"{TWO}</s>"],
        "call": [f'[TOOL_CALLS][{{"name": "add", "arguments": {CALLED}, "id": "abcdefghi"}}]</s>', "Two.</s>"],
        "only a call": "must decode to its text 'I ask.'",
    }),
    "Mistral Small, tekken": Case("mistral", "mistral-v7", {
        "plain": ["One.</s>", f"{TWO}</s>"],
        "call": "Only user, system and assistant roles are supported",
    }),
}  # fmt: skip
PAIRS = [(name, talk) for name, case in CASES.items() for talk in case.expected]
RENDERED = [pair for pair in PAIRS if isinstance(CASES[pair[0]].expected[pair[1]], list)]


def renderer_of(case: Case) -> tuple[Any, ChatRenderer]:
    tokenizer = family_tokenizer(case.family, template_text(case.template))
    # gpt-oss and Mistral write the date of the day.
    frozen = template_text(case.template).replace('strftime_now("%Y-%m-%d")', '"2026-11-30"')
    return tokenizer, ChatRenderer(tokenizer, case.kwargs, chat_template=frozen)


def options_of(talk: str) -> TemplateOptions:
    return TemplateOptions(TOOLS) if "call" in talk else TemplateOptions()


def runs_of(rendered: Rendered) -> list[list[int]]:
    """Returns the first token and one past the last of each run of the mask."""
    mask = [False, *rendered.loss_mask, False]
    edges = [t for t in range(len(mask) - 1) if mask[t] != mask[t + 1]]
    return [list(pair) for pair in zip(edges[::2], edges[1::2], strict=True)]


def golden_of(rendered: Rendered) -> dict[str, Any]:
    runs = runs_of(rendered)
    return {
        "num_tokens": len(rendered.input_ids),
        "ids_digest": xxhash.xxh3_128_hexdigest(json.dumps(rendered.input_ids).encode()),
        "supervised_runs": runs,
        "supervised_ids": [rendered.input_ids[start:end] for start, end in runs],
    }


@pytest.mark.parametrize(("name", "talk"), PAIRS)
def test_supervised_text_is_what_the_model_writes(name: str, talk: str) -> None:
    tokenizer, renderer = renderer_of(CASES[name])
    expected = CASES[name].expected[talk]
    if isinstance(expected, str):
        with pytest.raises(RenderingError, match=expected):
            renderer.render(TALKS[talk], options_of(talk))
        return
    rendered = renderer.render(TALKS[talk], options_of(talk))
    runs = runs_of(rendered)
    assert [str(tokenizer.decode(rendered.input_ids[start:end])) for start, end in runs] == expected
    num_answers = sum(message["role"] == "assistant" for message in TALKS[talk])
    assert rendered.num_context == num_answers - len(expected)


@pytest.mark.parametrize(("name", "talk"), RENDERED)
def test_ids_and_mask_are_golden(name: str, talk: str) -> None:
    rendered = renderer_of(CASES[name])[1].render(TALKS[talk], options_of(talk))
    assert golden_of(rendered) == json.loads(GOLDEN.read_text())[f"{name}: {talk}"]


@pytest.mark.parametrize(("name", "talk"), [pair for pair in RENDERED if "tags" not in pair[0]])
def test_each_supervised_answer_stands_behind_the_prompt_that_a_server_sends(name: str, talk: str) -> None:
    case, messages = CASES[name], TALKS[talk]
    tokenizer, renderer = renderer_of(case)
    rendered = renderer.render(messages, options_of(talk))
    prompts = []
    for i, message in enumerate(messages):
        if message["role"] == "assistant":
            prompts.append(renderer.prompt_ids(messages[:i], options_of(talk)))
    starts = [start for start, _ in runs_of(rendered)]
    assert starts[-1] == len(prompts[-1])
    assert [prompt for prompt in prompts if len(prompt) in starts] == [rendered.input_ids[:start] for start in starts]
    # transformers encodes the whole prompt at once.
    text = tokenizer.decode(prompts[-1])
    assert tokenizer(text, add_special_tokens=False)["input_ids"] == prompts[-1]


def test_a_dropped_thought_is_counted() -> None:
    assert renderer_of(CASES["Qwen 2.5"])[1].render(TALKS["thought"]).num_thoughts_dropped == 2
    assert renderer_of(CASES["Qwen 3, thinking"])[1].render(TALKS["thought"]).num_thoughts_dropped == 0
    assert renderer_of(CASES["Qwen 3, not thinking"])[1].render(TALKS["thought"]).num_thoughts_dropped == 1


def test_a_thought_inside_the_content_is_one() -> None:
    tokenizer, renderer = renderer_of(CASES["DeepSeek R1"])
    for content in ("<think>\nHm.\n</think>\n\nOne.", "Hm.\n</think>\n\nOne."):
        rendered = renderer.render([user("Hi"), assistant(content)])
        ((start, end),) = runs_of(rendered)
        assert str(tokenizer.decode(rendered.input_ids[start:end])) == f"Hm.\n</think>\n\nOne.{EOS}"


def test_templates_are_those_that_the_packages_ship() -> None:
    sources = json.loads((TEMPLATES / "sources.json").read_text())
    digests = {path.stem: hashlib.sha256(path.read_bytes()).hexdigest() for path in TEMPLATES.glob("*.jinja")}
    assert {name: source["sha256"] for name, source in sources.items()} == {
        name: digest for name, digest in digests.items() if not name.endswith("-test")
    }
    assert all(set(source) >= {"package", "version", "file_sha256", "path", "license"} for source in sources.values())


@pytest.mark.parametrize("talk", ["plain", "thought"])
def test_smollm2_with_its_own_tokenizer_and_template(smollm2_dir: Path, talk: str) -> None:
    tokenizer = load_tokenizer(str(smollm2_dir), trust_remote_code=False)
    rendered = ChatRenderer(tokenizer, {}).render(TALKS[talk])
    texts = [str(tokenizer.decode(rendered.input_ids[start:end])) for start, end in runs_of(rendered)]
    assert texts == [f"{message['content']}<|im_end|>" for message in TALKS[talk][1::2]]
    whole: Any = tokenizer.apply_chat_template(TALKS[talk], tokenize=True)
    assert whole["input_ids"] == rendered.input_ids
    if talk == "plain":
        assert golden_of(rendered) == json.loads(GOLDEN.read_text())["SmolLM2: plain"]


def write_golden(smollm2: str) -> None:
    """Writes golden.json; every entry is to be read against the expected texts above."""
    found = {
        f"{name}: {talk}": golden_of(renderer_of(CASES[name])[1].render(TALKS[talk], options_of(talk)))
        for name, talk in RENDERED
    }
    tokenizer = load_tokenizer(smollm2, trust_remote_code=False)
    found["SmolLM2: plain"] = golden_of(ChatRenderer(tokenizer, {}).render(TALKS["plain"]))
    lines = [f"{json.dumps(name)}: {json.dumps(each)}" for name, each in sorted(found.items())]
    GOLDEN.write_text("{\n" + ",\n".join(lines) + "\n}\n")


if __name__ == "__main__":
    write_golden(sys.argv[1])
