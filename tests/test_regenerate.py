"""The target's own answers become samples token for token, turn by turn."""

from pathlib import Path
from typing import Any

import pytest

from eagle3.capture.generation import Generation
from eagle3.capture.regenerate import Answered, answer_conversations, count_user_turns
from eagle3.prompts.conversations import BadRow, Conversation
from eagle3.prompts.rendering import ChatRenderer
from eagle3.prompts.tokenizers import load_tokenizer

END = 2  # <|im_end|> of the tiny target


@pytest.fixture(scope="module")
def tokenizer(tiny_target: Path) -> Any:
    return load_tokenizer(str(tiny_target), False)


@pytest.fixture(scope="module")
def renderer(tokenizer: Any) -> ChatRenderer:
    return ChatRenderer(tokenizer, {})


def user(text: str) -> dict[str, Any]:
    return {"role": "user", "content": text}


def assistant(text: str) -> dict[str, Any]:
    return {"role": "assistant", "content": text}


class Script:
    """Answers prompts from a list, and remembers how they came."""

    def __init__(self, answers: list[Generation]) -> None:
        self.batches: list[list[list[int]]] = []
        self._answers = iter(answers)

    def __call__(self, prompts: list[list[int]]) -> list[Generation]:
        self.batches.append(prompts)
        return [next(self._answers) for _ in prompts]


def finished(tokenizer: Any, text: str) -> Generation:
    return Generation([*tokenizer(text, add_special_tokens=False)["input_ids"], END], finished=True, looped=False)


def test_samples_are_prompts_and_answers_as_generated(tokenizer: Any, renderer: ChatRenderer) -> None:
    conversations = [
        # The file's own answers are left out.
        Conversation("two turns", (user("One?"), assistant("from the file"), user("Two?"), assistant("also")), line=1),
        Conversation("one turn", ({"role": "system", "content": "Be brief."}, user("Ten?")), line=2),
    ]
    script = Script([finished(tokenizer, text) for text in ("First.", "The only one.", "Second.")])
    two, one = answer_conversations(conversations, renderer, tokenizer, script, max_tokens=500)
    # All first turns come before any second one.
    assert [len(batch) for batch in script.batches] == [2, 1]
    assert isinstance(two, Answered)
    assert isinstance(one, Answered)
    assert tokenizer.decode(two.input_ids) == (
        "<|im_start|>user\nOne?<|im_end|>\n<|im_start|>assistant\nFirst.<|im_end|>\n"
        "<|im_start|>user\nTwo?<|im_end|>\n<|im_start|>assistant\nSecond.<|im_end|>"
    )
    assert [tokenizer.decode(two.input_ids[start:end]) for start, end in two.spans] == [
        "First.<|im_end|>",
        "Second.<|im_end|>",
    ]
    supervised = [token for token, kept in zip(two.input_ids, two.loss_mask, strict=True) if kept]
    assert tokenizer.decode(supervised) == "First.<|im_end|>Second.<|im_end|>"
    assert tokenizer.decode(one.input_ids).startswith("<|im_start|>system\nBe brief.<|im_end|>")
    # The same text rendered at once is the same ids and mask, but for the newline behind the last answer.
    rendered = renderer.render([user("One?"), assistant("First."), user("Two?"), assistant("Second.")])
    assert rendered.input_ids[: len(two.input_ids)] == two.input_ids
    assert rendered.loss_mask[: len(two.input_ids)] == two.loss_mask
    assert (two.num_unfinished, two.num_looped, two.num_reencoded, two.num_turns_dropped) == (0, 0, 0, 0)


def test_an_end_of_turn_token_that_was_not_generated_is_not_supervised(tokenizer: Any, renderer: ChatRenderer) -> None:
    cut = finished(tokenizer, "It goes on and").ids[:-1]
    script = Script([Generation(cut, finished=False, looped=False), Generation(cut, finished=False, looped=True)])
    conversations = [Conversation("a", (user("One?"), user("Two?")), line=1)]
    (sample,) = answer_conversations(conversations, renderer, tokenizer, script, max_tokens=500)
    assert isinstance(sample, Answered)
    assert [sample.input_ids[start:end] for start, end in sample.spans] == [cut, cut]
    assert sample.input_ids[sample.spans[0][1]] == END  # written by the template
    assert sample.loss_mask[sample.spans[0][1]] is False
    assert sample.input_ids[-1] == cut[-1]
    assert (sample.num_unfinished, sample.num_looped) == (1, 1)


def test_an_answer_that_encodes_otherwise_loses_its_supervision(tokenizer: Any, renderer: ChatRenderer) -> None:
    whole = tokenizer("the", add_special_tokens=False)["input_ids"]
    in_bytes = [token for letter in "the" for token in tokenizer(letter, add_special_tokens=False)["input_ids"]]
    assert in_bytes != whole, "the tiny tokenizer must have a merge in this word"
    answers = [
        finished(tokenizer, "First."),
        Generation([*in_bytes, END], finished=True, looped=False),
        finished(tokenizer, "Third."),
    ]
    conversations = [Conversation("a", (user("One?"), user("Two?"), user("Three?")), line=1)]
    (sample,) = answer_conversations(conversations, renderer, tokenizer, Script(answers), max_tokens=500)
    assert isinstance(sample, Answered)
    assert [tokenizer.decode(sample.input_ids[start:end]) for start, end in sample.spans] == [
        "First.<|im_end|>",
        "Third.<|im_end|>",
    ]
    assert sample.num_reencoded == 1
    third_prompt = [user("One?"), assistant("First."), user("Two?"), assistant("the"), user("Three?")]
    assert sample.input_ids[: sample.spans[1][0]] == renderer.prompt_ids(third_prompt)


def test_an_answer_that_encodes_otherwise_in_the_last_turn_stays(tokenizer: Any, renderer: ChatRenderer) -> None:
    in_bytes = [token for letter in "the" for token in tokenizer(letter, add_special_tokens=False)["input_ids"]]
    script = Script([Generation([*in_bytes, END], finished=True, looped=False)])
    (sample,) = answer_conversations([Conversation("a", (user("?"),), 1)], renderer, tokenizer, script, max_tokens=500)
    assert isinstance(sample, Answered)
    assert sample.input_ids[slice(*sample.spans[0])] == [*in_bytes, END]
    assert sample.num_reencoded == 0


def test_turns_without_room_are_dropped_and_counted(tokenizer: Any, renderer: ChatRenderer) -> None:
    messages = (user("One?"), user("Two? " * 60), user("Three?"), user("Four?"))
    script = Script([finished(tokenizer, "First.")])
    (sample,) = answer_conversations([Conversation("a", messages, 1)], renderer, tokenizer, script, max_tokens=120)
    assert isinstance(sample, Answered)
    assert tokenizer.decode(sample.input_ids).endswith("First.<|im_end|>")
    assert len(sample.spans) == 1
    assert sample.num_turns_dropped == 3


def test_a_first_prompt_without_room_is_a_bad_row(tokenizer: Any, renderer: ChatRenderer) -> None:
    conversations = [Conversation("a", (user("word " * 100),), line=7), Conversation("b", (user("?"),), line=8)]
    script = Script([finished(tokenizer, "Yes.")])
    bad, good = answer_conversations(conversations, renderer, tokenizer, script, max_tokens=100)
    assert isinstance(bad, BadRow)
    assert bad.line == 7
    assert bad.reason.startswith("the prompt must have fewer than 100 tokens, got ")
    assert isinstance(good, Answered)


def test_a_template_that_refuses_a_conversation_makes_it_a_bad_row(tokenizer: Any) -> None:
    script = Script([finished(tokenizer, "Yes.")])
    template = tokenizer.chat_template
    tokenizer.chat_template = (
        "{% if messages[0]['content'] == 'No' %}{{ raise_exception('not that') }}{% endif %}" + template
    )
    try:
        bad, good = answer_conversations(
            [Conversation("a", (user("No"),), line=3), Conversation("b", (user("?"),), line=4)],
            ChatRenderer(tokenizer, {}),
            tokenizer,
            script,
            max_tokens=100,
        )
    finally:
        tokenizer.chat_template = template
    assert isinstance(bad, BadRow)
    assert (bad.line, "not that" in bad.reason) == (3, True)
    assert isinstance(good, Answered)


def test_user_turns_are_counted() -> None:
    assert count_user_turns(Conversation("a", (user("1"), assistant("2"), user("3"), user("4")), line=1)) == 3
