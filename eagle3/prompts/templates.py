"""Chat template -> text, as the target's server renders it; what a template cannot read is tried as servers try it."""

import json
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, TypeVar

import xxhash
from jinja2 import TemplateSyntaxError
from transformers import PreTrainedTokenizerBase
from transformers.utils.chat_template_utils import render_jinja_template

from eagle3.config import UserError
from eagle3.prompts.answers import RenderingError
from eagle3.words import one_line

Made = TypeVar("Made")

# What the renderer passes to apply_chat_template itself.
RESERVED_TEMPLATE_KWARGS = (
    "add_generation_prompt",
    "chat_template",
    "continue_final_message",
    "conversation",
    "return_assistant_tokens_mask",
    "return_dict",
    "tokenize",
    "tools",
)


@dataclass(frozen=True)
class TemplateOptions:
    """What one conversation passes to the template besides its messages."""

    tools: tuple[dict[str, Any], ...] = ()  # in OpenAI's form
    kwargs: dict[str, Any] = field(default_factory=dict)  # over those of the config


NO_OPTIONS = TemplateOptions()


class MarkedText(NamedTuple):
    """A rendered conversation, and what generation tags mark of it."""

    text: str
    spans: list[tuple[int, int]]  # first character, one past the last


class ChatTemplate:
    """The template that a tokenizer has, or one that replaces it, with the keywords that every conversation passes."""

    def __init__(
        self, tokenizer: PreTrainedTokenizerBase, chat_template_kwargs: dict[str, Any], chat_template: str | None
    ) -> None:
        """`chat_template` is the text of one that replaces the tokenizer's.

        Raises:
            UserError: the tokenizer has no chat template or one that Jinja does not read, or a keyword is not the
                template's.
        """
        reserved = sorted(set(chat_template_kwargs) & set(RESERVED_TEMPLATE_KWARGS))
        if reserved:
            raise UserError(
                f"chat_template_kwargs must be the template's own, got {', '.join(reserved)}, which rendering sets "
                f"itself; remove them"
            )
        try:
            template = tokenizer.get_chat_template(chat_template)
        except ValueError as error:
            raise UserError(
                f"tokenizer must have a chat template, got none ({tokenizer.name_or_path!r}); "
                f"use the instruction-tuned model's tokenizer, or name one in prompts.chat_template"
            ) from error
        if not isinstance(template, str):
            raise UserError(
                f"tokenizer must have a chat template that is text, got {template!r} "
                f"({tokenizer.name_or_path!r}); download it again"
            )
        _check_syntax(template)
        self.source = template
        self.kwargs = dict(chat_template_kwargs)
        # The syntax that transformers looks for before it computes assistant masks.
        self.has_generation_tags = re.search(r"\{%-?\s*generation\s*-?%\}", template) is not None
        # gpt-oss's name for what everybody else calls reasoning_content.
        self._thinks_apart = "message.thinking" in template
        self._tokenizer = tokenizer
        self._special_tokens = tokenizer.special_tokens_map
        # Tokenizers that come as code may have their own, as Kimi-K2.5's does for tools.
        inherited = PreTrainedTokenizerBase.apply_chat_template
        self._overrides_template = type(tokenizer).apply_chat_template is not inherited

    def text(self, messages: Sequence[dict[str, Any]], options: TemplateOptions, *, add_generation_prompt: bool) -> str:
        """Renders a conversation, with or without the prompt for the assistant's next answer.

        Raises:
            RenderingError: the template refuses the messages.
        """
        return self._first(
            messages, options, lambda shown, tools: self._render(shown, tools, options, add_generation_prompt)
        )

    def marked(self, messages: Sequence[dict[str, Any]], options: TemplateOptions) -> MarkedText:
        """Renders a conversation, and finds what the template's generation tags mark.

        Raises:
            RenderingError: the template refuses the messages.
        """
        return self._first(messages, options, lambda shown, tools: self._render_marked(shown, tools, options))

    def digest(self) -> str:
        """Returns the xxh3_128 hex digest of the template's text and its keyword arguments."""
        return xxhash.xxh3_128_hexdigest(json.dumps([self.source, self.kwargs], sort_keys=True).encode())

    def _render(
        self, messages: list[Any], tools: list[Any] | None, options: TemplateOptions, add_generation_prompt: bool
    ) -> str:
        kwargs = {**self.kwargs, **options.kwargs, "add_generation_prompt": add_generation_prompt}
        if self._overrides_template:
            return str(
                self._tokenizer.apply_chat_template(
                    messages, tools=tools, tokenize=False, chat_template=self.source, **kwargs
                )
            )
        # What apply_chat_template does, without making the map of special tokens again for every text.
        rendered: Any = render_jinja_template(
            [messages], tools=tools, chat_template=self.source, **{**self._special_tokens, **kwargs}
        )
        return str(rendered[0][0])

    def _render_marked(self, messages: list[Any], tools: list[Any] | None, options: TemplateOptions) -> MarkedText:
        rendered: Any = render_jinja_template(
            [messages],
            tools=tools,
            chat_template=self.source,
            return_assistant_tokens_mask=True,
            **{**self._special_tokens, **self.kwargs, **options.kwargs},
        )
        (text,), (spans,) = rendered
        return MarkedText(text, spans)

    def _first(
        self,
        messages: Sequence[dict[str, Any]],
        options: TemplateOptions,
        render: Callable[[list[Any], list[Any] | None], Made],
    ) -> Made:
        """Returns what comes of the first request that the template can read."""
        errors = []
        for shown_messages, tools in self._requests(messages, options):
            try:
                return render(shown_messages, tools)
            except Exception as error:  # jinja2's own, and whatever a template's expressions raise
                errors.append(error)
        roles = ", ".join(message["role"] for message in messages)
        raise RenderingError(
            f"messages must suit the chat template, got the roles {roles} ({one_line(errors[0])})"
        ) from errors[0]

    def _requests(
        self, messages: Sequence[dict[str, Any]], options: TemplateOptions
    ) -> Iterable[tuple[list[Any], list[Any] | None]]:
        """Yields what the template gets, then what servers try if it cannot read that."""
        given = as_requested(messages)
        if self._thinks_apart:
            given = [
                {**message, "thinking": message["reasoning_content"]} if "reasoning_content" in message else message
                for message in given
            ]
        tools = list(options.tools) or None
        yield given, tools
        if tools:
            yield given, [tool["function"] for tool in tools]  # SGLang's second try, for Mistral's
        if any("tool_calls" in message for message in given):
            yield [_with_arguments_as_text(message) for message in given], tools  # DeepSeek's template adds strings


def as_requested(messages: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Returns messages as a client sends them: without the weights, which are for training."""
    return [{name: value for name, value in message.items() if name != "weight"} for message in messages]


def _as_text(arguments: dict[str, Any]) -> str:
    return json.dumps(arguments, ensure_ascii=False)  # as transformers' tojson


def _with_arguments_as_text(message: dict[str, Any]) -> dict[str, Any]:
    if "tool_calls" not in message:
        return message
    calls = [
        {**call, "function": {**call["function"], "arguments": _as_text(call["function"]["arguments"])}}
        for call in message["tool_calls"]
    ]
    return {**message, "tool_calls": calls}


def _check_syntax(template: str) -> None:
    try:
        render_jinja_template([[]], chat_template=template)
    except TemplateSyntaxError as error:
        raise UserError(
            f"chat template must be one that Jinja reads, got {one_line(error)} (line {error.lineno} of it); correct it"
        ) from error
    except Exception:  # it wants messages, and gets them row by row
        return
