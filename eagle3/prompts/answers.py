"""What the assistant wrote, between the prompt for its turn and the token that ends it.

A template renders an answer for history, which may not be what the model wrote: thoughts are left out, or an empty one
stands in their place. Then the answer is put together from its parts, in the way in which the prompt began it.
"""

import json
import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

THOUGHT_TAGS = ("<think>", "</think>")
# The end of a generation prompt that opens a thought, or that closes an empty one for the model.
_OPENED = re.compile(r"<think>\s*(?:</think>\s*)?\Z")
_THOUGHT = re.compile(r"\s*<think>(.*?)</think>\s*", re.DOTALL)
_REST_OF_THOUGHT = re.compile(r"(.*?)</think>\s*", re.DOTALL)
_ANCHOR_CHARS = 64  # of the text before an answer, enough to find its place again


class RenderingError(ValueError):
    """This conversation cannot be rendered with an exact mask; others of the same file may be."""


@dataclass(frozen=True)
class Call:
    """A call by what a template may show of it: Kimi's shows the id, which has the name in it, and not the name."""

    name: str
    id: str


@dataclass(frozen=True)
class Parts:
    """An assistant turn taken apart."""

    thought: str  # empty: none
    content: str
    calls: tuple["Call", ...]


@dataclass(frozen=True)
class Prompt:
    """The text that a server sends for an answer."""

    text: str
    header: str  # what the generation prompt opens the turn with
    opened: str  # and what it begins for the model: `<think>`, or an empty thought

    @property
    def forbids_thought(self) -> bool:
        """Tells whether the thought is closed before the model begins."""
        return THOUGHT_TAGS[1] in self.opened


def parts_of(message: dict[str, Any]) -> Parts:
    """Returns the parts of an assistant message; a thought that stands in its content is told apart."""
    calls = tuple(Call(call["function"]["name"], call.get("id", "")) for call in message.get("tool_calls", ()))
    content: str = message["content"]
    thought: str = message.get("reasoning_content", "")
    inline = (_THOUGHT.match(content) or _REST_OF_THOUGHT.match(content)) if THOUGHT_TAGS[1] in content else None
    if inline and not thought:
        return Parts(inline[1].strip(), content[inline.end() :], calls)
    return Parts(thought.strip(), content, calls)


def prompt_of(text: str, bare: str) -> Prompt:
    """Splits the prompt for an answer: `bare` is the same conversation without the generation prompt."""
    ending = text[len(bare) :] if text.startswith(bare) else ""
    opened = _OPENED.search(ending)
    at = opened.start() if opened else len(ending)
    return Prompt(text, ending[:at], ending[at:])


class AnswerReader:
    """Reads answers out of rendered text."""

    def __init__(self, template: str, control_tokens: Iterable[str]) -> None:
        control = sorted((text for text in control_tokens if text not in THOUGHT_TAGS), key=lambda text: -len(text))
        self._control = re.compile("|".join(re.escape(text) for text in control) or r"(?!)")
        self._knows_thoughts = any(word in template for word in ("think", "reasoning_content", "analysis"))
        self._gap = "\n" if "<think>\\n" in template or "<think>\n" in template else ""

    def check_spelling(self, message: dict[str, Any], i: int) -> None:
        """Refuses an answer that spells a control token.

        Raises:
            RenderingError: it does; the target would read the end of a turn, or the beginning of another, there.
        """
        texts = [message["content"], message.get("reasoning_content", "")]
        texts += [json.dumps(call["function"], ensure_ascii=False) for call in message.get("tool_calls", ())]
        found = next((match for text in texts if (match := self._control.search(text))), None)
        if found is not None:
            raise RenderingError(
                f"answer messages[{i}] must decode to its text, got one that spells the control token {found[0]!r}"
            )

    def up_to_end(self, region: str, i: int) -> str:
        """Returns the text of a turn up to its end token; templates write line ends behind it.

        Raises:
            RenderingError: it does not end in a control token.
        """
        ends = list(self._control.finditer(region))
        if not ends or region[ends[-1].end() :].strip():
            raise RenderingError(
                f"answer messages[{i}] must end in a control token, got none behind {region.strip()[-20:]!r}"
            )
        return region[: ends[-1].end()]

    def tagged(self, text: str, start: int, end: int, i: int) -> str:
        """Returns the text that tags mark, up to the end token in it or right behind it.

        Raises:
            RenderingError: there is none.
        """
        following = self._control.search(text, end)
        if self.without_end(text[start:end]) != text[start:end]:
            return self.up_to_end(text[start:end], i)
        if following is None or text[end : following.start()].strip():
            raise RenderingError(
                f"answer messages[{i}] must end in a control token, got none behind {text[start:end].strip()[-20:]!r}"
            )
        return text[start : following.end()]

    def without_end(self, written: str) -> str:
        """Returns the text of a turn without the control tokens that end it."""
        while matches := [each for each in self._control.finditer(written) if not written[each.end() :].strip()]:
            written = written[: matches[0].start()]
        return written

    def check_content(self, written: str, parts: Parts, i: int) -> None:
        """Compares what a template rendered with the message.

        Raises:
            RenderingError: the text is another one, or a call is missing.
        """
        body = self.without_end(written).strip()
        content = parts.content.strip()
        if not (content in body if parts.calls else body.endswith(content)):
            raise RenderingError(
                f"answer messages[{i}] must decode to its text {content[:40]!r}, got {body[:40]!r}: "
                f"the template or the tokenizer changes it"
            )
        around = body.replace(content, "", 1)
        missing = [call.name for call in parts.calls if call.name not in around and not (call.id and call.id in around)]
        if missing:
            raise RenderingError(
                f"answer messages[{i}] must be rendered with its calls, got a template that leaves out {missing}"
            )

    def lacks_thought(self, written: str, parts: Parts, prompt: Prompt) -> bool:
        """Tells whether the model wrote a thought here that the template leaves out."""
        # Behind a tool's result some templates open no turn, and the model goes on without a thought.
        asks = bool(prompt.header) and not prompt.forbids_thought
        return self._knows_thoughts and asks and bool(parts.thought) and parts.thought not in written

    def composed(self, prompt: Prompt, closing: str, bare: str, parts: Parts, i: int) -> str:
        """Returns what the model wrote behind a prompt that the template does not render in front of its answer.

        `closing` is the conversation with the answer as its last message, `bare` the one before it.

        Raises:
            RenderingError: the answer's place cannot be told, or the prompt asks for a thought that is not there.
        """
        anchor = bare[-_ANCHOR_CHARS:] + prompt.header
        at = closing.rfind(anchor)
        if at < 0 or not prompt.header:
            raise RenderingError(
                f"chat template must render messages[:{i}] with the generation prompt as the beginning of the whole, "
                f"got {differing(prompt.text, closing)}: it renders earlier turns differently once an answer follows"
            )
        region = self.up_to_end(closing[at + len(anchor) :], i)
        self.check_content(region, parts, i)
        if parts.thought and parts.thought in region and region.startswith(prompt.opened):
            return region[len(prompt.opened) :]  # in the template's own way, such as gpt-oss's
        block = _THOUGHT.match(region)
        body = region[block.end() :] if block else region
        if prompt.forbids_thought or not (parts.thought or prompt.opened):
            return body if prompt.forbids_thought else region
        if not parts.thought:
            raise RenderingError(
                f"answer messages[{i}] must have a thought (reasoning_content), since its prompt ends in "
                f"{prompt.opened!r}, got none; let the target write the answers, or switch its thinking off"
            )
        gap = prompt.opened.removeprefix(THOUGHT_TAGS[0]) if prompt.opened else self._gap
        opening = "" if prompt.opened else THOUGHT_TAGS[0] + gap
        # A template that cuts a thought out of the content leaves the line ends behind it.
        return f"{opening}{parts.thought}{gap}{THOUGHT_TAGS[1]}{2 * gap}{body.lstrip(gap) if gap else body}"


def differing(expected: str, text: str) -> str:
    """Shows both texts from just before the place where they part."""
    at = next(
        (j for j, (a, b) in enumerate(zip(expected, text, strict=False)) if a != b), min(len(expected), len(text))
    )
    at = max(at - 10, 0)
    return f"{text[at : at + 40]!r} instead of {expected[at : at + 40]!r}"
