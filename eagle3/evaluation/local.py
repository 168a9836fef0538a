"""Acceptance and speed with the target in this process."""

import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

from transformers import PreTrainedTokenizerBase

from eagle3.config import EvaluateConfig, UserError
from eagle3.draft.acceptance import AnswerRounds
from eagle3.draft.draft_vocab import DraftVocab
from eagle3.draft.export import load_drafter
from eagle3.draft.initial import init_drafter
from eagle3.draft.model import Eagle3Drafter
from eagle3.draft.target_weights import load_target_config, load_target_weights
from eagle3.evaluation.decoder import Answer, decode
from eagle3.evaluation.report import Measured, Report, Speed, Stopwatch, measure, progress_bar
from eagle3.evaluation.simulate import held_out_indices, open_store, simulate, simulate_store
from eagle3.evaluation.target import LocalTarget, load_local_target
from eagle3.evaluation.turns import AnsweredTurn, ask_all, asked, select_conversations
from eagle3.prompts.conversations import Conversation
from eagle3.prompts.loops import is_looping
from eagle3.prompts.tokenizers import load_tokenizer


def prepare_local(config: EvaluateConfig) -> Callable[[], Report]:
    """Reads what can be wrong; returns what decodes the prompts with the drafter, and does what else is asked for.

    Raises:
        UserError: target, drafter, store and prompts do not fit each other, or one of them cannot be read.
    """
    assert config.target is not None, "the caller checks that a target is named"
    assert config.drafter is not None, "the caller checks that a drafter is named"
    stopwatch = Stopwatch()
    with stopwatch.stage("load"):
        # What can be wrong is read before the target, which may take minutes to load.
        drafter = load_drafter(Path(config.drafter), load_target_config(Path(config.target.path)))
        _check_capture_layers(config, drafter)
        if config.store is not None:
            store = open_store(Path(config.store), drafter.config, config.target)
            indices = held_out_indices(store, config.held_out_share)
        conversations = select_conversations(config)
        tokenizer = load_tokenizer(config.target.path, config.target.trust_remote_code)
        target = load_local_target(config.target, drafter.config.capture_layers, tokenizer)
        drafter.to(target.device, target.dtype).eval()
        simulate_stored = None
        if config.store is not None:
            simulate_stored = partial(simulate_store, drafter, target.embed_tokens, store, indices, config)
    return partial(
        _evaluate,
        config,
        stopwatch,
        target=target,
        drafter=drafter,
        simulate_stored=simulate_stored,
        conversations=conversations,
        tokenizer=tokenizer,
    )


def _evaluate(
    config: EvaluateConfig,
    stopwatch: Stopwatch,
    *,
    target: LocalTarget,
    drafter: Eagle3Drafter,
    simulate_stored: Callable[[], Measured] | None,
    conversations: list[Conversation],
    tokenizer: PreTrainedTokenizerBase,
) -> Report:
    def answer_all(prompts: list[list[int]]) -> list[Answer]:
        return _decode(config, target, drafter, prompts, "decoding with the trained drafter")

    with stopwatch.stage("decode"):
        turns = ask_all(conversations, tokenizer, config, answer_all, target.end_ids)
    prompts = [turn.prompt_ids for turn in turns]
    untrained, simulated_store, speed = None, None, None
    if config.compare_untrained:
        with stopwatch.stage("decode_untrained"):
            fresh = _untrained_like(drafter, config, target)
            answers = _decode(config, target, fresh, prompts, "decoding with the untrained drafter")
            untrained = _measure(config, turns, answers)
    with stopwatch.stage("simulate"):
        simulated = _simulate_answers(config, target, drafter, turns)
    if simulate_stored is not None:
        with stopwatch.stage("simulate_store"):
            simulated_store = simulate_stored()
    if config.timed_prompts > 0:
        with stopwatch.stage("time"):
            speed = _time(config, target, drafter, prompts[: config.timed_prompts])
    return Report(
        num_draft_tokens=config.speculation.num_draft_tokens,
        max_new_tokens=config.max_new_tokens,
        num_conversations=len(conversations),
        num_answers=len(turns),
        num_looping=sum(is_looping(turn.answer.token_ids) for turn in turns),
        trained=_measure(config, turns, [turn.answer for turn in turns]),
        untrained=untrained,
        simulated=simulated,
        simulated_store=simulated_store,
        speed=speed,
        seconds=stopwatch.seconds,
    )


def decoded_rounds(sample_id: str, answer: Answer, num_draft_tokens: int) -> AnswerRounds:
    """Returns a decoded answer's rounds as the simulator counts them: drafts past the end of an answer are left out."""
    reached, accepted = [0.0] * num_draft_tokens, [0.0] * num_draft_tokens
    tokens_left = answer.num_tokens - 1  # prefill gave the first
    for num_accepted in answer.accepted:
        for position in range(min(num_accepted + 1, tokens_left, num_draft_tokens)):
            reached[position] += 1
            accepted[position] += position < num_accepted
        tokens_left -= num_accepted + 1
    return AnswerRounds(sample_id, answer.num_tokens, float(answer.rounds), tuple(reached), tuple(accepted))


def _check_capture_layers(config: EvaluateConfig, drafter: Eagle3Drafter) -> None:
    wanted = config.target.capture_layers if config.target is not None else None
    if wanted is not None and tuple(wanted) != drafter.config.capture_layers:
        raise UserError(
            f"target.capture_layers must be {list(drafter.config.capture_layers)}, which the drafter reads, "
            f"got {wanted} ({config.drafter}); leave the setting out: the drafter says it"
        )


def _decode(
    config: EvaluateConfig,
    target: LocalTarget,
    drafter: Eagle3Drafter,
    prompts: list[list[int]],
    description: str,
) -> list[Answer]:
    with progress_bar(description, len(prompts), "answer") as advance:
        return decode(
            target,
            drafter,
            prompts,
            num_draft_tokens=config.speculation.num_draft_tokens,
            max_new_tokens=config.max_new_tokens,
            batch_size=config.batch_size,
            on_answer=lambda answer: advance(1),
        )


def _measure(config: EvaluateConfig, turns: Sequence[AnsweredTurn[Answer]], answers: list[Answer]) -> Measured:
    """Summarises answers to the prompts of `turns`."""
    rounds = [
        decoded_rounds(turn.sample_id, answer, config.speculation.num_draft_tokens)
        for turn, answer in zip(turns, answers, strict=True)
    ]
    return measure(asked(turns, [answer.token_ids for answer in answers], rounds), config.seed)


def _simulate_answers(
    config: EvaluateConfig, target: LocalTarget, drafter: Eagle3Drafter, turns: Sequence[AnsweredTurn[Answer]]
) -> Measured:
    """Simulates the very answers that were decoded, from features of one more prefill."""
    with progress_bar("simulating the same answers", len(turns), "answer") as advance:
        rounds = simulate(
            drafter,
            target.embed_tokens,
            (target.features(turn.sample_id, turn.prompt_ids, turn.answer.token_ids) for turn in turns),
            num_draft_tokens=config.speculation.num_draft_tokens,
            advance=advance,
        )
    return measure(asked(turns, [turn.answer.token_ids for turn in turns], rounds), config.seed)


def _untrained_like(drafter: Eagle3Drafter, config: EvaluateConfig, target: LocalTarget) -> Eagle3Drafter:
    """Returns a drafter of the same shape and draft vocabulary that starts as training starts it."""
    assert config.target is not None, "the caller checks that a target is named"
    fresh = Eagle3Drafter(drafter.config)
    init_drafter(
        fresh,
        load_target_weights(Path(config.target.path)),
        DraftVocab(d2t=drafter.d2t.cpu(), t2d=drafter.t2d.cpu()),
        seed=config.seed,
        init_from_target=True,
    )
    return fresh.to(target.device, target.dtype).eval()


def _time(config: EvaluateConfig, target: LocalTarget, drafter: Eagle3Drafter, prompts: list[list[int]]) -> Speed:
    """Decodes prompts one at a time, each plain and then speculatively, so that both see the same machine."""
    seconds = {"plain": 0.0, "speculative": 0.0}
    num_tokens = {"plain": 0, "speculative": 0}
    num_equal = 0
    with progress_bar("timing one stream, plain and with the trained drafter", len(prompts), "prompt") as advance:
        for prompt in prompts:
            answers = {}
            for name, maybe_drafter in (("plain", None), ("speculative", drafter)):
                started = time.perf_counter()
                (answers[name],) = decode(
                    target,
                    maybe_drafter,
                    [prompt],
                    num_draft_tokens=config.speculation.num_draft_tokens,
                    max_new_tokens=config.max_new_tokens,
                    batch_size=1,
                )
                seconds[name] += time.perf_counter() - started
                num_tokens[name] += answers[name].num_tokens
            num_equal += answers["plain"].token_ids == answers["speculative"].token_ids
            advance(1)
    return Speed(
        num_prompts=len(prompts),
        tokens_per_second_plain=num_tokens["plain"] / seconds["plain"],
        tokens_per_second_speculative=num_tokens["speculative"] / seconds["speculative"],
        num_equal_answers=num_equal,
    )
