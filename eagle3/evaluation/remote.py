"""Acceptance and speed with the target in a server that is running."""

from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch
from transformers import PreTrainedTokenizerBase

from eagle3.config import EvaluateConfig, UserError
from eagle3.draft.export import load_drafter
from eagle3.draft.target_weights import load_target_config, load_target_weights
from eagle3.evaluation.report import Measured, Report, Stopwatch, measure, progress_bar
from eagle3.evaluation.served import (
    ServedAnswer,
    ServerFacts,
    SGLangClient,
    check_counters,
    findings,
    num_steps_of,
    served_rounds,
)
from eagle3.evaluation.simulate import held_out_indices, open_store, simulate_store
from eagle3.evaluation.turns import ask_all, asked, select_conversations
from eagle3.evaluation.vllm import VLLMClient, is_vllm
from eagle3.evaluation.vllm import findings as vllm_findings
from eagle3.prompts.conversations import Conversation
from eagle3.prompts.tokenizers import end_token_ids, load_tokenizer


def prepare_served(config: EvaluateConfig) -> Callable[[], Report]:
    """Reads what can be wrong; returns what sends the prompts to a server, SGLang's or vLLM's, and reads its counters.

    Raises:
        UserError: the server cannot be reached, or says what no such server can; or prompts or store do not fit.
    """
    assert config.server is not None, "the caller checks that a server is named"
    runs_vllm = is_vllm(config.server)
    if runs_vllm and config.explain:
        raise UserError(
            f"explain must be false with a vLLM server, got true ({config.server}); the doctor asks SGLang alone: run "
            f"`python -m eagle3 doctor DRAFTER --target TARGET` beside it"
        )
    client = (VLLMClient if runs_vllm else SGLangClient)(config.server, config.max_new_tokens)
    facts = client.facts()
    check_counters(facts)
    conversations = select_conversations(config)
    tokenizer_path = _tokenizer_path(config, facts)
    tokenizer = load_tokenizer(str(tokenizer_path), _trusts_remote_code(config))
    return partial(
        _evaluate,
        config,
        client,
        facts=facts,
        num_draft_tokens=num_steps_of(facts, config.speculation.num_draft_tokens),
        conversations=conversations,
        tokenizer=tokenizer,
        end_ids=end_token_ids(tokenizer_path, tokenizer),
        simulate_stored=_prepare_simulation(config) if config.store is not None else None,
    )


def _evaluate(
    config: EvaluateConfig,
    client: SGLangClient | VLLMClient,
    *,
    facts: ServerFacts,
    num_draft_tokens: int,
    conversations: list[Conversation],
    tokenizer: PreTrainedTokenizerBase,
    end_ids: frozenset[int],
    simulate_stored: Callable[[], Measured] | None,
) -> Report:
    stopwatch = Stopwatch()
    simulated_store = None
    if simulate_stored is not None:
        with stopwatch.stage("simulate_store"):
            simulated_store = simulate_stored()

    def answer_all(prompts: list[list[int]]) -> list[ServedAnswer]:
        with progress_bar("asking the server", len(prompts), "answer") as advance:
            return client.answer_all(prompts, config.batch_size, lambda answer: advance(1))

    with stopwatch.stage("serve"):
        turns = ask_all(conversations, tokenizer, config, answer_all, end_ids)
    answers = [turn.answer for turn in turns]
    rounds = served_rounds([turn.sample_id for turn in turns], answers, num_draft_tokens)
    trained = measure(asked(turns, [answer.token_ids for answer in answers], rounds), config.seed)
    return Report(
        num_draft_tokens=num_draft_tokens,
        max_new_tokens=config.max_new_tokens,
        num_conversations=len(conversations),
        num_answers=len(answers),
        num_looping=sum(bool(question.loops) for question in trained.questions),
        trained=trained,
        simulated_store=simulated_store,
        tokens_per_second_served=sum(answer.num_tokens for answer in answers) / stopwatch.seconds["serve"],
        server=facts,
        findings=vllm_findings(answers) if isinstance(client, VLLMClient) else findings(answers, facts),
        seconds=stopwatch.seconds,
    )


def _tokenizer_path(config: EvaluateConfig, facts: ServerFacts) -> Path:
    """Returns where the server's tokenizer is: at the path that the server names, if this machine has it too."""
    if Path(facts.tokenizer_path).is_dir():
        return Path(facts.tokenizer_path)
    if config.target is not None:
        return Path(config.target.path)
    raise UserError(
        f"target.path must name the served model's directory, since the server's {facts.tokenizer_path!r} is not on "
        f"this machine, got null; its tokenizer renders the prompts"
    )


def _trusts_remote_code(config: EvaluateConfig) -> bool:
    return config.target is not None and config.target.trust_remote_code


def _prepare_simulation(config: EvaluateConfig) -> Callable[[], Measured]:
    """Opens drafter and store; returns what simulates with the target's embedding alone, no target in this process."""
    assert config.target is not None, "the config was checked"
    assert config.drafter is not None, "the config was checked"
    assert config.store is not None, "the caller checks that a store is named"
    path = Path(config.target.path)
    drafter = load_drafter(Path(config.drafter), load_target_config(path))
    store = open_store(Path(config.store), drafter.config, config.target)
    dtype = getattr(torch, config.target.dtype)
    device = "cuda" if torch.cuda.is_available() and config.target.device != "cpu" else "cpu"
    weights = load_target_weights(path).to(device, dtype)
    indices = held_out_indices(store, config.held_out_share)
    return partial(simulate_store, drafter.to(device, dtype).eval(), weights.embed_tokens, store, indices, config)
