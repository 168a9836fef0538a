"""What a server is asked for, and what its answers mean."""

import secrets
from collections.abc import Callable
from itertools import count
from typing import Any

import torch
import xxhash

from eagle3.capture.dispatch import Job, JobError
from eagle3.capture.engine import TopTwo
from eagle3.capture.generation import Generation
from eagle3.capture.launch import ServerError
from eagle3.capture.server import Server
from eagle3.config import RegenerateConfig
from eagle3.prompts.loops import first_occurrence_end


def ask_answer(
    server: Server, job: Job, settings: RegenerateConfig, max_tokens: int, timeout_seconds: float
) -> Generation:
    """Asks for the answer to a prompt, as token ids."""
    room = max_tokens - len(job.input_ids)
    assert room > 0, f"prompts must have fewer than max_tokens={max_tokens} tokens, got {len(job.input_ids)}"
    sampling = {
        "max_new_tokens": min(settings.max_new_tokens, room),
        "temperature": settings.temperature,
        "top_p": settings.top_p,
        "top_k": -1,  # what is not said here would be what the server prefers
        "repetition_penalty": 1.0,
        "sampling_seed": prompt_seed(settings.seed, job.input_ids),
    }
    body = {"input_ids": job.input_ids, "rid": job.request_id, "sampling_params": sampling}
    answer = post_job(server, body, timeout_seconds)
    ids = answer["output_ids"]
    end = first_occurrence_end(ids) if settings.cut_loops else None
    if end is not None:
        return Generation(ids[:end], finished=False, looped=True)
    return Generation(ids, finished=answer["meta_info"]["finish_reason"]["type"] == "stop", looped=False)


def ask_prefill(server: Server, job: Job, timeout_seconds: float) -> bool:
    """Asks for a prefill and for nothing of it; True when it is done."""
    post_job(server, prefill_body(job.input_ids, job.request_id), timeout_seconds)
    return True


def ask_top_two(server: Server, job: Job, timeout_seconds: float) -> TopTwo:
    """Asks for a prefill with the engine's own log-probabilities."""
    body = prefill_body(job.input_ids, job.request_id)
    body |= {"return_logprob": True, "logprob_start_len": 0, "top_logprobs_num": 2}
    answer = post_job(server, body, timeout_seconds)
    # The first token of a prompt has no logprobs; what follows the last one is the output's.
    rows = [*answer["meta_info"]["input_top_logprobs"][1:], *answer["meta_info"]["output_top_logprobs"]]
    return TopTwo(
        ids=torch.tensor([[token for _, token, _ in row] for row in rows]),
        logprobs=torch.tensor([[logprob for logprob, _, _ in row] for row in rows]),
    )


def prefill_body(input_ids: list[int], request_id: str) -> dict[str, Any]:
    """Returns a request for one prefill of exactly these tokens."""
    return {
        "input_ids": input_ids,
        "rid": request_id,
        "extra_key": request_id,  # a name space of its own in the prefix cache, where that is on
        "sampling_params": {"max_new_tokens": 1, "temperature": 0.0},
    }


def post_job(server: Server, body: dict[str, Any], timeout_seconds: float) -> dict[str, Any]:
    """Sends a request for tokens, which the server may refuse with a JobError."""
    try:
        answer: dict[str, Any] = server.post("/generate", body, timeout_seconds)
    except ServerError as error:
        raise JobError(str(error)) from error
    reason = answer["meta_info"]["finish_reason"]
    if reason["type"] == "abort":
        raise JobError(f"the server must finish the request, got {reason}")
    return answer


def prompt_seed(seed: int, prompt: list[int]) -> int:
    """Returns a seed of a prompt's own, so that its answer does not depend on its neighbours."""
    return xxhash.xxh3_64_intdigest(f"{seed} {prompt}".encode()) % 2**63


def request_ids() -> Callable[[], str]:
    """Returns a maker of ids that no other request has and that are not recorded."""
    run, numbers = secrets.token_hex(4), count()
    return lambda: f"{run}-{next(numbers)}"
