"""One row in any accepted format -> messages as the target's server would take them.

What a server would do to a request is done here: parts of text are joined, arguments become objects, no content becomes
an empty one. What would change the conversation if it were left out is refused by name.
"""

from collections.abc import Callable
from typing import Any

from eagle3.prompts.messages import message_of, with_call_ids
from eagle3.prompts.row_values import RowError, check_json, checked_text, parsed, shown, type_name

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
        messages.insert(0, {"role": "system", "content": checked_text(system, "system")})
    roles = [message["role"] for message in messages]
    name = kind if kind in row else "row"
    if "user" not in roles:
        raise RowError(f"{name} must have a user turn, got only {', '.join(sorted(set(roles)))} turns")
    if "assistant" in roles and roles.index("assistant") < roles.index("user"):
        raise RowError(f"{name} must have a user turn before the first answer, got the roles {', '.join(roles)}")
    return tuple(with_call_ids(messages))


def tools_of(row: dict[str, Any]) -> tuple[dict[str, Any], ...]:
    """Returns the tools of a row in OpenAI's form; they may be a list, or JSON text of one.

    Raises:
        RowError: they are neither.
    """
    if row.get("functions"):
        raise RowError(f"row must have tools instead of the old 'functions' field, got {shown(row['functions'])}")
    tools = row.get("tools")
    if isinstance(tools, str) and tools.strip():
        tools = parsed(tools, "tools")
    if not tools:
        return ()
    if not isinstance(tools, list) or not all(isinstance(tool, dict) for tool in tools):
        raise RowError(f"tools must be a list of objects, got {shown(row['tools'])}")
    wrapped = [tool if "function" in tool else {"type": "function", "function": tool} for tool in tools]
    for i, tool in enumerate(wrapped):
        if not isinstance(tool["function"], dict) or not isinstance(tool["function"].get("name"), str):
            raise RowError(f"tools[{i}] must have a name, got {shown(tools[i])}")
    check_json(wrapped, "tools")
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
    check_json(given, "chat_template_kwargs")
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
    text = checked_text(row["text"], "text")
    if not text.strip():
        raise RowError(f"text must not be empty, got {shown(text)}")
    return text


def domain_of(row: dict[str, Any]) -> str | None:
    """Returns what the row says it is about, for reports."""
    return next((row[name] for name in DOMAIN_FIELDS if isinstance(row.get(name), str)), None)


def _turns(row: dict[str, Any], name: str) -> list[dict[str, Any]]:
    turns = row[name]
    if isinstance(turns, str) and turns.lstrip().startswith("["):
        turns = parsed(turns, name)
    if not isinstance(turns, list):
        raise RowError(f"{name} must be a list, got {type_name(turns)}")
    if not turns:
        raise RowError(f"{name} must have at least one turn, got an empty list")
    return [message_of(turn, f"{name}[{i}]") for i, turn in enumerate(turns)]


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
    question = checked_text(row["instruction"], "instruction")
    extra = checked_text(row.get("input") or "", "input")
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
    return message_of({"role": "user", "content": text}, where, "")


def _answer(text: Any, where: str) -> dict[str, Any]:
    return message_of({"role": "assistant", "content": text}, where, "")
