"""One turn in any accepted form -> a message in OpenAI's form, as the target's server would take it."""

from typing import Any

from eagle3.prompts.row_values import RowError, check_json, checked_text, parsed, shown, type_name

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


def message_of(turn: Any, where: str, field: str | None = None) -> dict[str, Any]:
    """Returns one turn in OpenAI's form; `where` is its place in the row, `field` that of its content in it.

    Raises:
        RowError: something in it is missing, of another type, or not supported.
    """
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
        call = parsed(content, place)
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
        message["reasoning_content"] = checked_text(thought, f"{where}.reasoning_content")
    weight = turn.get("weight", 1)
    if role == "assistant" and weight not in (0, 1):
        raise RowError(f"{where}.weight must be 0 or 1, got {shown(weight)}")
    if role == "assistant" and weight == 0:
        message["weight"] = 0
    for name in ("name", "tool_call_id"):
        if turn.get(name) is not None:
            message[name] = checked_text(turn[name], f"{where}.{name}")
    # A call may come without words, and a tool may say nothing.
    if role in ("user", "assistant") and not message["content"].strip() and not calls:
        article = "an" if given.startswith("a") else "a"
        raise RowError(f"{place} must be {article} {given} turn with text, got {message['content']!r}")
    return message


def _content(content: Any, where: str, *, may_be_null: bool) -> str:
    if content is None and may_be_null:
        return ""
    if not isinstance(content, list):
        return checked_text(content, where)
    texts = []
    for i, part in enumerate(content):
        if isinstance(part, dict) and part.get("type", "text") != "text":
            raise RowError(f"{where}[{i}] must be a part of type 'text', got {shown(part['type'])}")
        texts.append(checked_text(part.get("text") if isinstance(part, dict) else part, f"{where}[{i}]"))
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
            arguments = parsed(arguments, f"{where}[{i}].arguments") if arguments.strip() else {}
        if arguments is None:
            arguments = {}
        if not isinstance(arguments, dict):
            raise RowError(f"{where}[{i}].arguments must be an object, got {type_name(arguments)}")
        named = {"id": call["id"]} if isinstance(call.get("id"), str) else {}
        found.append({**named, "type": "function", "function": {"name": name, "arguments": arguments}})
    check_json(found, where)
    return found


def with_call_ids(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
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
