"""One row in any accepted format -> messages as the target's server would take them.

What a server would do to a request is done here: parts of text are joined, arguments become objects, no content becomes
an empty one. What would change the conversation if it were left out is refused by name.
"""

import json
from collections.abc import Callable
from typing import Any

ROLES = {
    "system": "system",
    "developer": "developer",
    "user": "user",
    "human": "user",
    "prompter": "user",
    "assistant": "assistant",
    "gpt": "assistant",
    "chatgpt": "assistant",
    "bot": "assistant",
    "model": "assistant",
    "function_call": "assistant",
    "tool_call": "assistant",
    "tool": "tool",
    "function": "tool",
    "observation": "tool",
    "function_response": "tool",
    "tool_response": "tool",
    "ipython": "tool",
}
OPENAI_ROLES = ("system", "developer", "user", "assistant", "tool")
CALLING_ROLES = ("function_call", "tool_call")  # ShareGPT: the turn's text is the call
FORMATS = (
    "messages",
    "conversations",
    "prompt/completion",
    "instruction/output",
    "token ids",
    "text",
    "prompts",
)
# Questions alone, as benchmarks and logs have them.
QUESTION_FIELDS = ("prompt", "question", "query", "turns")
DOMAIN_FIELDS = ("domain", "category", "source", "dataset", "task")
IGNORED_TOKEN = -100  # a label that trains nothing, as transformers has it
MAX_TOKEN = 2**31 - 1  # a store keeps them in 32 bits


class RowError(ValueError):
    """Why a row cannot be used; never leaves the reading of prompts."""


def detect_format(row: dict[str, Any]) -> str:
    """Returns the format of a row, one of FORMATS.

    Raises:
        RowError: it has none of them, or two conversations at once.
    """
    if "messages" in row and "conversations" in row:
        raise RowError(f"row must have either 'messages' or 'conversations', got the fields {sorted(row)}")
    for name in ("messages", "conversations"):
        if name in row:
            return name
    if "input_ids" in row:
        return "token ids"
    if "prompt" in row and ("completion" in row or "response" in row):
        return "prompt/completion"
    if "instruction" in row:
        return "instruction/output"
    if any(name in row for name in QUESTION_FIELDS):
        return "prompts"
    if "text" in row:
        return "text"
    raise RowError(
        f"row must have messages, conversations, prompt and completion, instruction and output, input_ids, text or "
        f"a prompt, got the fields {sorted(row)}"
    )


def messages_of(row: dict[str, Any], kind: str) -> tuple[dict[str, Any], ...]:
    """Returns a row's conversation in OpenAI's form, as a server's template gets it.

    Raises:
        RowError: something in it is missing, of another type, or not supported.
    """
    messages = _MESSAGES_OF[kind](row)
    system = row.get("system") or row.get("system_prompt")
    if system and messages[0]["role"] != "system":
        messages.insert(0, {"role": "system", "content": _text(system, "system")})
    roles = [message["role"] for message in messages]
    name = kind if kind in row else "row"
    if "user" not in roles:
        raise RowError(f"{name} must have a user turn, got only {', '.join(sorted(set(roles)))} turns")
    if "assistant" in roles and roles.index("assistant") < roles.index("user"):
        raise RowError(f"{name} must have a user turn before the first answer, got the roles {', '.join(roles)}")
    return tuple(_with_call_ids(messages))


def tools_of(row: dict[str, Any]) -> tuple[dict[str, Any], ...]:
    """Returns the tools of a row in OpenAI's form; they may be a list, or JSON text of one.

    Raises:
        RowError: they are neither.
    """
    if row.get("functions"):
        raise RowError(f"row must have tools instead of the old 'functions' field, got {shown(row['functions'])}")
    tools = row.get("tools")
    if isinstance(tools, str) and tools.strip():
        tools = _parsed(tools, "tools")
    if not tools:
        return ()
    if not isinstance(tools, list) or not all(isinstance(tool, dict) for tool in tools):
        raise RowError(f"tools must be a list of objects, got {shown(row['tools'])}")
    wrapped = [tool if "function" in tool else {"type": "function", "function": tool} for tool in tools]
    for i, tool in enumerate(wrapped):
        if not isinstance(tool["function"], dict) or not isinstance(tool["function"].get("name"), str):
            raise RowError(f"tools[{i}] must have a name, got {shown(tools[i])}")
    _check_json(wrapped, "tools")
    return tuple(wrapped)


def template_kwargs_of(row: dict[str, Any], reserved: tuple[str, ...]) -> dict[str, Any]:
    """Returns the template keywords that a row brings itself, e.g. enable_thinking.

    Raises:
        RowError: they are no object, or one of the `reserved`.
    """
    given = row.get("chat_template_kwargs")
    if given is None:
        return {}
    if not isinstance(given, dict):
        raise RowError(f"chat_template_kwargs must be an object, got {type_name(given)}")
    taken = sorted(set(given) & set(reserved))
    if taken:
        raise RowError(f"chat_template_kwargs must be the template's own, got {', '.join(taken)}")
    _check_json(given, "chat_template_kwargs")
    return given


def tokens_of(row: dict[str, Any]) -> tuple[list[int], list[bool]]:
    """Returns ids and mask of a row that is tokenised already: `input_ids` with `loss_mask`, or with `labels`.

    Raises:
        RowError: ids or mask are missing, of another length or type, or nothing is supervised.
    """
    ids = row["input_ids"]
    if not isinstance(ids, list) or not ids or not all(type(token) is int and 0 <= token <= MAX_TOKEN for token in ids):
        raise RowError(f"input_ids must be a list of token ids, got {shown(ids)}")
    name = next((each for each in ("loss_mask", "assistant_masks", "labels") if each in row), None)
    if name is None:
        raise RowError(f"row with input_ids must have loss_mask or labels, got the fields {sorted(row)}")
    mask = row[name]
    if not isinstance(mask, list) or len(mask) != len(ids):
        num = len(mask) if isinstance(mask, list) else type_name(mask)
        raise RowError(f"{name} must have one entry for each of {len(ids)} input_ids, got {num}")
    if name == "labels":
        wrong = next((i for i, label in enumerate(mask) if label not in (IGNORED_TOKEN, ids[i])), None)
        if wrong is not None:
            raise RowError(f"labels[{wrong}] must be {IGNORED_TOKEN} or the id {ids[wrong]}, got {shown(mask[wrong])}")
        mask = [label != IGNORED_TOKEN for label in mask]
    elif not all(counts in (0, 1) for counts in mask):
        raise RowError(f"{name} must hold zeros and ones, got {shown(mask)}")
    if not any(mask):
        raise RowError(f"{name} must supervise at least one token, got none of {len(mask)}")
    return ids, [bool(counts) for counts in mask]


def text_of(row: dict[str, Any]) -> str:
    """Returns the raw text of a row.

    Raises:
        RowError: it is no text, or an empty one.
    """
    text = _text(row["text"], "text")
    if not text.strip():
        raise RowError(f"text must not be empty, got {shown(text)}")
    return text


def domain_of(row: dict[str, Any]) -> str | None:
    """Returns what the row says it is about, for reports."""
    return next((row[name] for name in DOMAIN_FIELDS if isinstance(row.get(name), str)), None)


def _turns(row: dict[str, Any], name: str) -> list[dict[str, Any]]:
    turns = row[name]
    if isinstance(turns, str) and turns.lstrip().startswith("["):
        turns = _parsed(turns, name)
    if not isinstance(turns, list):
        raise RowError(f"{name} must be a list, got {type_name(turns)}")
    if not turns:
        raise RowError(f"{name} must have at least one turn, got an empty list")
    return [_message(turn, f"{name}[{i}]") for i, turn in enumerate(turns)]


def _prompt_completion(row: dict[str, Any]) -> list[dict[str, Any]]:
    """Texts, or lists of messages."""
    prompt, name = row["prompt"], "completion" if "completion" in row else "response"
    asked = _turns(row, "prompt") if isinstance(prompt, list) else [_user(prompt, "prompt")]
    answered = _turns(row, name) if isinstance(row[name], list) else [_answer(row[name], name)]
    return asked + answered


def _instruction(row: dict[str, Any]) -> list[dict[str, Any]]:
    """Alpaca: the input stands behind the instruction; `history` holds earlier pairs."""
    messages = []
    history = row.get("history") or []
    if not isinstance(history, list) or not all(isinstance(pair, list) and len(pair) == 2 for pair in history):
        raise RowError(f"history must be a list of pairs, got {shown(history)}")
    for i, (asked, answered) in enumerate(history):
        messages += [_user(asked, f"history[{i}][0]"), _answer(answered, f"history[{i}][1]")]
    question = _text(row["instruction"], "instruction")
    extra = _text(row.get("input") or "", "input")
    messages.append(_user("\n\n".join(part for part in (question, extra) if part.strip()), "instruction"))
    name = next((each for each in ("output", "response") if each in row), None)
    if name is not None:
        messages.append(_answer(row[name], name))
    return messages


def _questions(row: dict[str, Any]) -> list[dict[str, Any]]:
    name = next(name for name in QUESTION_FIELDS if name in row)
    questions = row[name]
    if isinstance(questions, list) and questions and isinstance(questions[0], dict):
        return _turns(row, name)
    if not isinstance(questions, list):
        questions = [questions]
    if not questions:
        raise RowError(f"{name} must have at least one turn, got an empty list")
    return [_user(each, name if len(questions) == 1 else f"{name}[{i}]") for i, each in enumerate(questions)]


_MESSAGES_OF: dict[str, Callable[[dict[str, Any]], list[dict[str, Any]]]] = {
    "messages": lambda row: _turns(row, "messages"),
    "conversations": lambda row: _turns(row, "conversations"),
    "prompt/completion": _prompt_completion,
    "instruction/output": _instruction,
    "prompts": _questions,
}


def _user(text: Any, where: str) -> dict[str, Any]:
    return _message({"role": "user", "content": text}, where, "")


def _answer(text: Any, where: str) -> dict[str, Any]:
    return _message({"role": "assistant", "content": text}, where, "")


def _message(turn: Any, where: str, field: str | None = None) -> dict[str, Any]:
    """Returns one turn in OpenAI's form; `where` is its place in the row, `field` that of its content in it."""
    if not isinstance(turn, dict):
        raise RowError(f"{where} must be an object, got {type_name(turn)}")
    role_field = next((name for name in ("role", "from") if name in turn), None)
    content_field = next((name for name in ("content", "value", "text") if name in turn), None)
    calls = turn.get("tool_calls")
    if role_field is None or (content_field is None and not calls):
        raise RowError(f"{where} must have role and content (or from and value), got the fields {sorted(turn)}")
    given = turn[role_field]
    if not isinstance(given, str) or given.lower() not in ROLES:
        raise RowError(
            f"{where}.{role_field} must be one of {', '.join(OPENAI_ROLES)} or ShareGPT's names for them, "
            f"got {shown(given)}"
        )
    role = ROLES[given.lower()]
    if turn.get("function_call"):
        raise RowError(f"{where} must have tool_calls instead of the old 'function_call' field")
    place = where if field == "" else f"{where}.{content_field or 'content'}"
    content = _content(turn[content_field] if content_field else None, place, may_be_null=role == "assistant")
    message: dict[str, Any] = {"role": role, "content": content}
    if given.lower() in CALLING_ROLES:
        call = _parsed(content, place)
        message["content"] = ""
        calls = call if isinstance(call, list) else [call]
    if calls:
        if role != "assistant":
            raise RowError(f"{where}.tool_calls must stand in an assistant turn, got a {given} turn")
        message["tool_calls"] = _tool_calls(calls, f"{where}.tool_calls")
    thought = next((turn[name] for name in ("reasoning_content", "reasoning", "thinking") if turn.get(name)), None)
    if thought is not None:
        if role != "assistant":
            raise RowError(f"{where}.reasoning_content must stand in an assistant turn, got a {given} turn")
        message["reasoning_content"] = _text(thought, f"{where}.reasoning_content")
    weight = turn.get("weight", 1)
    if role == "assistant" and weight not in (0, 1):
        raise RowError(f"{where}.weight must be 0 or 1, got {shown(weight)}")
    if role == "assistant" and weight == 0:
        message["weight"] = 0
    for name in ("name", "tool_call_id"):
        if turn.get(name) is not None:
            message[name] = _text(turn[name], f"{where}.{name}")
    # A call may come without words, and a tool may say nothing.
    if role in ("user", "assistant") and not message["content"].strip() and not calls:
        article = "an" if given.startswith("a") else "a"
        raise RowError(f"{place} must be {article} {given} turn with text, got {message['content']!r}")
    return message


def _content(content: Any, where: str, *, may_be_null: bool) -> str:
    if content is None and may_be_null:
        return ""
    if not isinstance(content, list):
        return _text(content, where)
    texts = []
    for i, part in enumerate(content):
        if isinstance(part, dict) and part.get("type", "text") != "text":
            raise RowError(f"{where}[{i}] must be a part of type 'text', got {shown(part['type'])}")
        texts.append(_text(part.get("text") if isinstance(part, dict) else part, f"{where}[{i}]"))
    return " ".join(texts)  # as SGLang joins them for a template that takes text


def _tool_calls(calls: Any, where: str) -> list[dict[str, Any]]:
    if not isinstance(calls, list):
        raise RowError(f"{where} must be a list, got {type_name(calls)}")
    found = []
    for i, call in enumerate(calls):
        function = call.get("function", call) if isinstance(call, dict) else None
        name = function.get("name") if isinstance(function, dict) else None
        if not isinstance(function, dict) or not isinstance(name, str) or not name.strip():
            raise RowError(f"{where}[{i}] must have a function with a name, got {shown(call)}")
        arguments = function.get("arguments", function.get("parameters"))
        if isinstance(arguments, str):
            arguments = _parsed(arguments, f"{where}[{i}].arguments") if arguments.strip() else {}
        if arguments is None:
            arguments = {}
        if not isinstance(arguments, dict):
            raise RowError(f"{where}[{i}].arguments must be an object, got {type_name(arguments)}")
        named = {"id": call["id"]} if isinstance(call.get("id"), str) else {}
        found.append({**named, "type": "function", "function": {"name": name, "arguments": arguments}})
    _check_json(found, where)
    return found


def _with_call_ids(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Names calls that have no id as Kimi does, and results by the calls before them, in order."""
    num_calls, open_ids = 0, []
    for message in messages:
        for call in message.get("tool_calls", ()):
            call.setdefault("id", f"functions.{call['function']['name']}:{num_calls}")
            open_ids.append(call["id"])
            num_calls += 1
        if message["role"] == "tool":
            answered = message.setdefault("tool_call_id", open_ids[0]) if open_ids else message.get("tool_call_id")
            if answered in open_ids:
                open_ids.remove(answered)
    return messages


def parse_json(text: str) -> Any:
    """Parses JSON.

    Raises:
        RowError: an object has a field twice: a parser keeps the last one, and the row would mean something else.
        ValueError, RecursionError: it is no JSON, or past the limits of Python's numbers or nesting.
    """
    return json.loads(text, object_pairs_hook=_object)


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    made = dict(pairs)
    if len(made) != len(pairs):
        names = [name for name, _ in pairs]
        twice = next(name for name in names if names.count(name) > 1)
        raise RowError(f"row must have each field once, got {shown(twice)} twice in one object")
    return made


def _parsed(text: str, where: str) -> Any:
    try:
        return parse_json(text)
    except RowError:
        raise
    except (ValueError, RecursionError) as error:
        raise RowError(f"{where} must be JSON, got {shown(text)} ({error})") from error


def _text(value: Any, where: str) -> str:
    if not isinstance(value, str):
        raise RowError(f"{where} must be a string, got {type_name(value)}")
    if not is_unicode(value):
        raise RowError(f"{where} must be valid Unicode, got half of a surrogate pair")
    return value


def _check_json(value: Any, where: str) -> None:
    """Refuses what a request to a server could not hold: a date out of a table, NaN, half of a surrogate pair."""
    try:
        text = json.dumps(value, allow_nan=False, ensure_ascii=False)
    except (TypeError, ValueError, RecursionError) as error:
        raise RowError(f"{where} must hold what JSON has, got {shown(value)} ({error})") from error
    _text(text, where)


def is_unicode(text: str) -> bool:
    """Tells whether text has no lone surrogates: JSON can spell them, UTF-8 and tokenizers cannot."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def type_name(value: Any) -> str:
    """Names a JSON value's type as JSON does."""
    names = {dict: "an object", list: "a list", str: "a string", bool: "a boolean", type(None): "null"}
    return names.get(type(value), "a number" if isinstance(value, int | float) else f"a {type(value).__name__}")


def shown(value: Any) -> str:
    """Returns a value for a message, cut to a length that fits one line."""
    text = ascii(value)
    return text if len(text) <= 60 else text[:57] + "..."
