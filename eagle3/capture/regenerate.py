"""The target answers the prompts itself, so that training is on-policy.

Ids stay as they were generated. A later turn's prompt is what the server would see, the template applied to the
answers' text; where that does not begin with the ids so far, the earlier answers are context, no longer supervised.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from transformers import PreTrainedTokenizerBase

from eagle3.capture.engine import SetAside
from eagle3.capture.generation import Generation
from eagle3.prompts.answers import RenderingError
from eagle3.prompts.conversations import BadRow, Conversation
from eagle3.prompts.rendering import ChatRenderer
from eagle3.prompts.tokenizers import answer_text


@dataclass(frozen=True)
class Answered:
    """One conversation with the target's own answers."""

    sample_id: str
    input_ids: list[int]  # (T,)
    spans: list[tuple[int, int]]  # of the supervised answers: first token, one past the end-of-turn token
    num_unfinished: int = 0  # answers that ended at a token limit
    num_looped: int = 0  # answers that were cut where they began to repeat themselves
    num_reencoded: int = 0  # answers that lost their supervision, since their text encodes to other ids
    num_turns_dropped: int = 0  # user turns that found no room under the token limit

    @property
    def loss_mask(self) -> list[bool]:  # (T,)
        """True on the tokens of the supervised answers."""
        mask = [False] * len(self.input_ids)
        for start, end in self.spans:
            mask[start:end] = [True] * (end - start)
        return mask


@dataclass
class _Dialogue:
    conversation: Conversation
    unread: list[dict[str, Any]]  # messages to come, the file's own answers left out
    messages: list[dict[str, Any]] = field(default_factory=list)  # so far, with the target's answers
    input_ids: list[int] = field(default_factory=list)
    spans: list[tuple[int, int]] = field(default_factory=list)
    num_unfinished: int = 0
    num_looped: int = 0
    num_reencoded: int = 0
    num_turns_dropped: int = 0
    problem: str | None = None  # why the conversation cannot be used


def answer_conversations(
    conversations: Sequence[Conversation],
    renderer: ChatRenderer,
    tokenizer: PreTrainedTokenizerBase,
    generate: Callable[[list[list[int]]], Sequence[Generation | SetAside]],
    max_tokens: int,
) -> list[Answered | BadRow]:
    """Answers every user turn, all first turns together, then all second turns, and so on.

    `generate` answers prompts of fewer than `max_tokens` tokens, and keeps prompt and answer within them. A
    conversation that fills them ends there; one whose first prompt does not fit, or has no answer, is a BadRow.
    """
    dialogues = [_Dialogue(each, [m for m in each.messages if m["role"] != "assistant"]) for each in conversations]
    while True:
        prompts = [
            (dialogue, prompt) for dialogue in dialogues if (prompt := _next_prompt(dialogue, renderer, max_tokens))
        ]
        if not prompts:
            return [_result(dialogue) for dialogue in dialogues]
        for (dialogue, prompt), answer in zip(prompts, generate([prompt for _, prompt in prompts]), strict=True):
            if isinstance(answer, SetAside):
                dialogue.problem = f"the target must answer a prompt of {len(prompt)} tokens, got {answer.reason}"
            else:
                _add_answer(dialogue, prompt, answer, tokenizer)


def count_user_turns(conversation: Conversation) -> int:
    """Returns how many answers a conversation gets."""
    return sum(message["role"] == "user" for message in conversation.messages)


def _next_prompt(dialogue: _Dialogue, renderer: ChatRenderer, max_tokens: int) -> list[int] | None:
    """Returns the prompt of the next user turn, None if the dialogue has ended."""
    turn_end = next((i for i, message in enumerate(dialogue.unread, start=1) if message["role"] == "user"), None)
    if turn_end is None or dialogue.problem is not None:
        return None
    dialogue.messages += dialogue.unread[:turn_end]
    dialogue.unread = dialogue.unread[turn_end:]
    try:
        prompt = renderer.prompt_ids(dialogue.messages, dialogue.conversation.options)
    except RenderingError as error:
        dialogue.problem = str(error)
        return None
    if len(prompt) < max_tokens:
        return prompt
    if dialogue.input_ids:
        dialogue.num_turns_dropped = 1 + sum(message["role"] == "user" for message in dialogue.unread)
        dialogue.unread = []
    else:
        dialogue.problem = f"the prompt must have fewer than {max_tokens} tokens, got {len(prompt)}"
    return None


def _add_answer(dialogue: _Dialogue, prompt: list[int], answer: Generation, tokenizer: PreTrainedTokenizerBase) -> None:
    common = next(
        (j for j, (seen, now) in enumerate(zip(dialogue.input_ids, prompt, strict=False)) if seen != now),
        min(len(dialogue.input_ids), len(prompt)),
    )
    kept = [span for span in dialogue.spans if span[1] <= common]
    dialogue.num_reencoded += len(dialogue.spans) - len(kept)
    dialogue.spans = [*kept, (len(prompt), len(prompt) + len(answer.ids))]
    dialogue.input_ids = prompt + answer.ids
    dialogue.num_unfinished += not (answer.finished or answer.looped)
    dialogue.num_looped += answer.looped
    content = answer_text(tokenizer, answer.ids, finished=answer.finished)
    dialogue.messages.append({"role": "assistant", "content": content})


def _result(dialogue: _Dialogue) -> Answered | BadRow:
    if dialogue.problem is not None:
        return BadRow(line=dialogue.conversation.line, reason=dialogue.problem)
    return Answered(
        sample_id=dialogue.conversation.id,
        input_ids=dialogue.input_ids,
        spans=dialogue.spans,
        num_unfinished=dialogue.num_unfinished,
        num_looped=dialogue.num_looped,
        num_reencoded=dialogue.num_reencoded,
        num_turns_dropped=dialogue.num_turns_dropped,
    )
