"""Chat template -> ids and mask, token-exact.

The whole conversation is encoded once. What the assistant wrote is the text between the prompt for its turn and the end
of the turn; both are rendered apart only to see that they are beginnings of the whole.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

from transformers import PreTrainedTokenizerBase

from eagle3.config import PromptsConfig, UserError
from eagle3.prompts.answers import AnswerReader, Parts, RenderingError, differing, parts_of, prompt_of
from eagle3.prompts.encoding import Encoded, Encoder
from eagle3.prompts.templates import NO_OPTIONS, ChatTemplate, TemplateOptions
from eagle3.words import counted, one_line


@dataclass(frozen=True)
class Rendered:
    """One conversation as the target reads it."""

    input_ids: list[int]  # (T,)
    loss_mask: list[bool]  # (T,) True on each answer's text and its end-of-turn token
    num_context: int = field(default=0, compare=False)  # answers that stand there as later turns see them: not masked
    num_thoughts_dropped: int = field(default=0, compare=False)  # masked answers without the thought of their message


@dataclass(frozen=True)
class _Span:
    """What the assistant wrote, by characters."""

    message: int
    start: int
    end: int  # one past the end token


class ChatRenderer:
    """Renders messages as the target's server does, and marks what the assistant wrote."""

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        chat_template_kwargs: dict[str, Any],
        *,
        chat_template: str | None = None,
        train_on: Literal["all", "last"] = "all",
    ) -> None:
        """`chat_template_kwargs` reach the template as they are, e.g. enable_thinking.

        `chat_template` is the text of one that replaces the tokenizer's; `train_on` says which answers are marked.

        Raises:
            UserError: the tokenizer has no chat template or one that Jinja does not read, or a keyword is not the
                template's.
        """
        self._template = ChatTemplate(tokenizer, chat_template_kwargs, chat_template)
        self._tokenizer = tokenizer
        self._train_on = train_on
        control = {token.content for token in tokenizer.added_tokens_decoder.values() if token.special}
        self._reader = AnswerReader(self._template.source, control | set(tokenizer.all_special_tokens))
        self._encoder = Encoder(tokenizer)

    def render(self, messages: Sequence[dict[str, Any]], options: TemplateOptions = NO_OPTIONS) -> Rendered:
        """Encodes a conversation, with a mask that is all False if it has no assistant turn to learn from.

        An earlier answer is marked where it stands as the target wrote it, behind the prompt that the target had; one
        that the template rewrites for the later turns is context. The last answer is always as the target wrote it.

        Raises:
            RenderingError: the template refuses the messages, or what the assistant wrote is not a run of whole tokens
                that decodes to its text and ends in a control token.
        """
        answers = [i for i, message in enumerate(messages) if message["role"] == "assistant"]
        text = self._template.text(messages, options, add_generation_prompt=False)
        self._check_questions(messages, text)
        for i in answers:
            self._reader.check_spelling(messages[i], i)
        spans: list[_Span] = []
        if self._template.has_generation_tags and answers:
            spans = self._tagged_spans(messages, options, text, answers)
        elif answers:
            text, last = self._last_answer(messages, options, text, answers[-1])
            earlier = answers[:-1] if self._train_on == "all" else []
            spans = [span for i in earlier if (span := self._earlier_answer(messages, options, text, i)) is not None]
            spans.append(last)
        if self._train_on == "last":
            spans = spans[-1:]
            answers = answers[-1:]
        # OpenAI's mark on an answer that is not to be learnt from.
        spans = [span for span in spans if messages[span.message].get("weight", 1)]
        num_wanted = sum(messages[i].get("weight", 1) for i in answers)
        encoded = self._encoder.encode(text)
        loss_mask = [False] * len(encoded.ids)
        num_thoughts_dropped = 0
        for span in spans:
            start, end = self._tokens(encoded, text, span, messages)
            loss_mask[start:end] = [True] * (end - start)
            num_thoughts_dropped += parts_of(messages[span.message]).thought not in text[span.start : span.end]
        return Rendered(
            encoded.ids, loss_mask, num_context=num_wanted - len(spans), num_thoughts_dropped=num_thoughts_dropped
        )

    def __reduce__(self) -> tuple[Any, ...]:
        """Lets other processes have it: what is compiled and cached is made again there."""
        return _made_again, (self._tokenizer, self._template.kwargs, self._template.source, self._train_on)

    @property
    def can_be_sent(self) -> bool:
        """Tells whether other processes can have it; a tokenizer that comes as code is not known there."""
        return bool(self._tokenizer.is_fast)

    @cached_property
    def num_token_ids(self) -> int:
        """One more than the highest id that the tokenizer gives."""
        return max(self._tokenizer.get_vocab().values()) + 1

    @property
    def chat_template_kwargs(self) -> dict[str, Any]:
        """What every row passes to the template."""
        return dict(self._template.kwargs)

    def decode(self, ids: list[int]) -> str:
        """Returns the text of ids with its control tokens."""
        return self._encoder.decode(ids)

    def render_text(self, text: str) -> Rendered:
        """Encodes raw text, all of it supervised."""
        ids = self._encoder.encode(text).ids
        return Rendered(ids, [True] * len(ids))

    def prompt_ids(self, messages: Sequence[dict[str, Any]], options: TemplateOptions = NO_OPTIONS) -> list[int]:
        """Encodes a conversation up to and including the prompt for the assistant's next answer.

        Raises:
            RenderingError: the template refuses the messages.
        """
        text = self._template.text(messages, options, add_generation_prompt=True)
        self._check_questions(messages, text)
        return self._encoder.encode(text).ids

    def template_digest(self) -> str:
        """Returns the xxh3_128 hex digest of the template's text and its keyword arguments."""
        return self._template.digest()

    def _check_questions(self, messages: Sequence[dict[str, Any]], text: str) -> None:
        """Refuses messages that the template leaves out without a word, as many do with a developer's."""
        for i, message in enumerate(messages):
            if message["role"] not in ("assistant", "tool") and message["content"].strip() not in text:
                raise RenderingError(
                    f"messages[{i}] must stand in what the chat template renders, got a {message['role']} turn that "
                    f"it leaves out or changes"
                )

    def _last_answer(
        self, messages: Sequence[dict[str, Any]], options: TemplateOptions, whole: str, i: int
    ) -> tuple[str, _Span]:
        """Returns the text to encode, and the span of its last answer, messages[i]."""
        opening = self._template.text(messages[:i], options, add_generation_prompt=True)
        is_last = i == len(messages) - 1
        closing = whole if is_last else self._template.text(messages[: i + 1], options, add_generation_prompt=False)
        parts = parts_of(messages[i])
        if closing.startswith(opening):
            written = self._reader.up_to_end(closing[len(opening) :], i)
            self._reader.check_content(written, parts, i)
            if not self._lacks_thought(messages[:i], options, opening, written, parts):
                text = whole if whole.startswith(opening + written) else opening + written
                return text, _Span(i, len(opening), len(opening) + len(written))
        bare = self._template.text(messages[:i], options, add_generation_prompt=False) if i else ""
        prompt = prompt_of(opening, bare)
        written = self._reader.composed(prompt, closing, bare, parts, i)
        return prompt.text + written, _Span(i, len(prompt.text), len(prompt.text) + len(written))

    def _earlier_answer(
        self, messages: Sequence[dict[str, Any]], options: TemplateOptions, text: str, i: int
    ) -> _Span | None:
        """Returns the span of messages[i] in `text`; None if it does not stand there as the target wrote it."""
        opening = self._template.text(messages[:i], options, add_generation_prompt=True)
        closing = self._template.text(messages[: i + 1], options, add_generation_prompt=False)
        if not text.startswith(opening) or not closing.startswith(opening):
            return None
        written = self._reader.up_to_end(closing[len(opening) :], i)
        if not text.startswith(written, len(opening)):
            return None
        parts = parts_of(messages[i])
        self._reader.check_content(written, parts, i)
        if self._lacks_thought(messages[:i], options, opening, written, parts):
            return None
        return _Span(i, len(opening), len(opening) + len(written))

    def _lacks_thought(
        self, before: Sequence[dict[str, Any]], options: TemplateOptions, opening: str, written: str, parts: Parts
    ) -> bool:
        """Tells whether the model wrote a thought behind its prompt that the template leaves out."""
        if parts.thought in written:
            return False
        bare = self._template.text(before, options, add_generation_prompt=False) if before else ""
        return self._reader.lacks_thought(written, parts, prompt_of(opening, bare))

    def _tagged_spans(
        self, messages: Sequence[dict[str, Any]], options: TemplateOptions, text: str, answers: list[int]
    ) -> list[_Span]:
        """Returns the spans that generation tags mark, one for each answer, from prompt to end token."""
        marked_text, marked = self._template.marked(messages, options)
        if marked_text != text:
            raise RenderingError(
                f"chat template must render the same text again, got {differing(text, marked_text)}: it writes the "
                f"time, or a number of chance"
            )
        if len(marked) != len(answers):
            raise RenderingError(
                f"chat template must mark one generation span per answer, got {counted(len(marked), 'span')} for "
                f"{counted(len(answers), 'answer')}"
            )
        spans = []
        for i, (start, end) in zip(answers, marked, strict=True):
            # A tagged span may open with the generation prompt, which the assistant does not write.
            opening = self._template.text(messages[:i], options, add_generation_prompt=True)
            bare = self._template.text(messages[:i], options, add_generation_prompt=False) if i else ""
            header = prompt_of(opening, bare).header
            if text.startswith(opening):
                start = max(start, len(opening))
            elif header and text.startswith(header, start):
                start += len(header)
            closing = self._template.text(messages[: i + 1], options, add_generation_prompt=False)
            if text.startswith(closing):
                written = self._reader.up_to_end(text[start : len(closing)], i)
            else:
                written = self._reader.tagged(text, start, end, i)
            self._reader.check_content(written, parts_of(messages[i]), i)
            spans.append(_Span(i, start, start + len(written)))
        return spans

    def _tokens(self, encoded: Encoded, text: str, span: _Span, messages: Sequence[dict[str, Any]]) -> tuple[int, int]:
        """Returns the first token of a span and one past its last."""
        start, end = encoded.token_at(span.start), encoded.token_at(span.end)
        content = messages[span.message]["content"]
        if start is None or end is None:
            raise RenderingError(
                f"answer messages[{span.message}] must begin at a token of its own, got a token that joins the "
                f"generation prompt and {content[:20]!r}"
            )
        written = text[span.start : span.end]
        decoded = self._encoder.decode(encoded.ids[start:end])
        # Some decoders put a space before the first word, or drop one.
        if decoded.strip() != written.strip():
            raise RenderingError(
                f"answer messages[{span.message}] must decode to its text, got "
                f"{differing(written.strip(), decoded.strip())}: the tokenizer changes it"
            )
        return start, end


def _made_again(
    tokenizer: PreTrainedTokenizerBase, kwargs: dict[str, Any], template: str, train_on: Literal["all", "last"]
) -> ChatRenderer:
    return ChatRenderer(tokenizer, kwargs, chat_template=template, train_on=train_on)


def make_renderer(tokenizer: PreTrainedTokenizerBase, config: PromptsConfig) -> ChatRenderer:
    """Returns the renderer that a config asks for.

    Raises:
        UserError: there is no template, or a keyword is not the template's.
    """
    template = None
    if config.chat_template is not None:
        try:
            template = Path(config.chat_template).read_text(encoding="utf-8")
        except (FileNotFoundError, NotADirectoryError, IsADirectoryError):
            raise UserError(
                f"prompts.chat_template must be a file, got none at {config.chat_template!r}; check the path"
            ) from None
        except ValueError as error:
            raise UserError(
                f"prompts.chat_template must be text in UTF-8, got {one_line(error)} ({config.chat_template!r})"
            ) from error
    return ChatRenderer(tokenizer, config.chat_template_kwargs, chat_template=template, train_on=config.train_on)
