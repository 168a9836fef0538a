"""The target behind SGLang servers: captures states, generates answers.

The same interface as the target in this process. A sample waits in the staging directory until it is read, and no
more of them are asked for than fit its budget.
"""

import logging
import time
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from functools import partial
from typing import Any

import requests
import torch
from torch import Tensor

from eagle3.capture.asking import ask_answer, ask_prefill, ask_top_two, post_job, prefill_body, request_ids
from eagle3.capture.dispatch import Dispatcher, Job, JobError
from eagle3.capture.engine import Captured, CodedCapture, EngineFacts, SetAside, StagingUse, TopTwo
from eagle3.capture.generation import Generation
from eagle3.capture.launch import ServerError
from eagle3.capture.server import Server, ServerFacts
from eagle3.capture.staging import CODEC_VARIABLE
from eagle3.capture.staging_area import SampleError, StagingArea
from eagle3.config import RegenerateConfig, ServerConfig, UserError
from eagle3.features.codec import Codec, decode, rounding_steps
from eagle3.features.manifest import DTYPES

logger = logging.getLogger(__name__)

PROBE_IDS = [0, 1, 2]
FILE_SECONDS = 60  # between an answer and its sample, at most: the server's writer may be gigabytes behind
ATTACHED_SECONDS = 60  # for a server that somebody else started to answer
# Settings of a server that change its numbers: a store says with which of them it was begun.
NUMERIC_SETTINGS = (
    "attention_backend",
    "chunked_prefill_size",
    "dp_size",
    "dtype",
    "enable_deterministic_inference",
    "ep_size",
    "kv_cache_dtype",
    "moe_runner_backend",
    "page_size",
    "quantization",
    "sampling_backend",
    "tp_size",
)


class SGLangEngine:
    """Runs the target in servers that record."""

    def __init__(
        self,
        servers: Sequence[Server],
        area: StagingArea,
        config: ServerConfig,
        capture_layers: Sequence[int],
        codec: Codec | None = None,
    ) -> None:
        """Waits until each server has recorded a sample; states may come coded in `codec`, that of the store.

        Raises:
            UserError: a server died, does not answer, or records nothing, other layers or in another codec; or two are
                not alike.
        """
        self.capture_layers = list(capture_layers)
        self.servers = list(servers)
        self.area = area
        self._config = config
        self._codec = codec
        self._dtypes: dict[str, str] = {}  # url -> dtype of what it recorded
        self._bytes_per_token = 0  # of a sample, from the server whose are largest
        for server in servers:
            self._wait_until_ready(server)
        self.server_facts: list[ServerFacts] = [server.facts() for server in servers]
        self.facts = self._common_facts()

    @property
    def max_tokens(self) -> int:
        """Tokens of the longest sequence that each server takes."""
        return min(facts.max_tokens for facts in self.server_facts)

    @property
    def staging(self) -> StagingUse:
        """How full the staging directory is."""
        return StagingUse(self.area.used_bytes, self.area.budget_bytes)

    def num_answers_together(self, settings: RegenerateConfig) -> int:
        """Returns how many prompts are answered at the same time."""
        return self._config.max_requests * len(self.servers)

    def capture(self, sequences: Sequence[Sequence[int]]) -> list[Captured]:
        """Runs sequences and returns their states, in their order; decoded, if they come coded.

        Raises:
            UserError: a sequence has no states.
        """
        captured: dict[int, Captured] = {}
        for index, result in self.capture_each(sequences):
            if isinstance(result, SetAside):
                raise UserError(f"sequence {index} must be captured, got {result.reason}")
            captured[index] = _decoded(result, self.facts.dtype) if isinstance(result, CodedCapture) else result
        return [captured[index] for index in range(len(captured))]

    def capture_each(
        self, sequences: Iterable[Sequence[int]]
    ) -> Generator[tuple[int, Captured | CodedCapture | SetAside], None, None]:
        """Runs sequences, each taken when there is room for it; yields (its place, states) as they come.

        Raises:
            UserError: a server stays away, or a sequence is longer than it takes.
        """
        task = _Capture(self.area, self._config, self._bytes_per_token, self._recover)
        for job, result in self._dispatch(task, sequences):
            yield job.index, result

    def generate(
        self,
        prompts: Sequence[Sequence[int]],
        settings: RegenerateConfig,
        *,
        max_tokens: int | None = None,
        on_tokens: Callable[[int], None] = lambda num_tokens: None,
    ) -> list[Generation | SetAside]:
        """Answers each prompt; prompt and answer together have at most `max_tokens` (and the servers' limit).

        Raises:
            UserError: a server stays away.
        """
        limit = min(self.max_tokens, max_tokens or self.max_tokens)
        timeout = self._config.request_timeout_seconds
        ask = partial(ask_answer, settings=settings, max_tokens=limit, timeout_seconds=timeout)
        task = _Unrecorded(ask, self._recover)
        answers: dict[int, Generation | SetAside] = {}
        for job, result in self._dispatch(task, prompts):
            answers[job.index] = result
            if isinstance(result, Generation):
                on_tokens(len(result.ids))
        return [answers[index] for index in range(len(answers))]

    def top_two(self, sequences: Sequence[Sequence[int]], *, together: bool) -> list[TopTwo]:
        """Returns what the engine itself would say at each position, asked one by one or all at once: for gates.

        Raises:
            UserError: a server stays away, or a sequence has no answer.
        """
        found: dict[int, TopTwo] = {}
        max_requests = self._config.max_requests if together else 1
        ask = partial(ask_top_two, timeout_seconds=self._config.request_timeout_seconds)
        for job, result in self._dispatch(_Unrecorded(ask, self._recover), sequences, max_requests):
            if isinstance(result, SetAside):
                raise UserError(f"sequence {job.index} must be scored, got {result.reason}")
            found[job.index] = result
        return [found[index] for index in range(len(found))]

    def plain_tokens_per_second(self, sequences: Sequence[Sequence[int]]) -> float:
        """Measures prefill without recording, of the same sequences; the first pass warms up."""
        ask = partial(ask_prefill, timeout_seconds=self._config.request_timeout_seconds)
        for _ in range(2):
            started = time.monotonic()
            for _ in self._dispatch(_Unrecorded(ask, self._recover), sequences):
                pass
        return sum(len(sequence) for sequence in sequences) / (time.monotonic() - started)

    def log_normaliser(self, last_hidden_states: Tensor) -> None:
        """Returns None: the head is in the servers."""

    def _dispatch(
        self, task: Any, sequences: Iterable[Sequence[int]], max_requests: int | None = None
    ) -> Iterator[tuple[Job, Any]]:
        jobs = (Job(index, self._checked(sequence)) for index, sequence in enumerate(sequences))
        return Dispatcher(self.servers, max_requests or self._config.max_requests, task).run(jobs)

    def _common_facts(self) -> EngineFacts:
        first, *others = [
            EngineFacts(
                version=facts.version,
                dtype=self._dtypes[server.url],
                settings={name: facts.settings[name] for name in NUMERIC_SETTINGS if name in facts.settings},
            )
            for server, facts in zip(self.servers, self.server_facts, strict=True)
        ]
        for server, facts in zip(self.servers[1:], others, strict=True):
            if facts != first:
                raise ServerError(
                    f"servers of one store must be alike, got {first} from {self.servers[0].url} and {facts} from "
                    f"{server.url}; start them with the same SGLang and the same flags"
                )
        return first

    def _checked(self, sequence: Sequence[int]) -> list[int]:
        if not 0 < len(sequence) <= self.max_tokens:
            raise UserError(
                f"sequences must have 1 to {self.max_tokens} tokens, which the server takes, got {len(sequence)}; "
                f"lower prompts.max_tokens, or raise context-length and max-total-tokens in server.flags"
            )
        return list(sequence)

    def _recover(self, server: Server) -> None:
        if server.is_ours:
            server.restart()
            self._wait_until_ready(server)
        else:
            # It has been silent for long enough to count as hung, and what it is asked now is not its first forward.
            patience = min(ATTACHED_SECONDS, self._config.request_timeout_seconds)
            server.wait_until(partial(self._probe, server, patience), patience)

    def _wait_until_ready(self, server: Server) -> None:
        # The first forward of a server may compile kernels for minutes.
        longest = patience = self._config.startup_timeout_seconds
        if not server.is_ours:
            patience = ATTACHED_SECONDS
            logger.info("waiting until %s records what it runs", server.url)  # one that hangs says nothing itself
        server.wait_until(partial(self._probe, server, longest), patience)

    def _probe(self, server: Server, timeout_seconds: float) -> None:
        """Records three tokens; raises what is wrong with them."""
        life = server.life
        request_id = self.area.new_request_id(len(PROBE_IDS))
        server.post("/generate", prefill_body(PROBE_IDS, request_id), timeout_seconds)
        try:
            self.area.wait_for(request_id, FILE_SECONDS, lambda: server.lives(life))
            sample = self.area.take(request_id)
        except SampleError as error:
            server.check_alive()
            raise ServerError(
                f"{server.url} must record what it runs, got {error}; start it with eagle3 installed beside sglang and "
                f"with EAGLE3_CAPTURE_DIR={self.area.directory}"
            ) from error
        boundaries = self.area.recorded_boundaries()
        if boundaries != self.capture_layers:
            raise ServerError(
                f"{server.url} must record the boundaries {self.capture_layers}, got {boundaries}; "
                f"start it with EAGLE3_CAPTURE_LAYERS={','.join(map(str, self.capture_layers))}"
            )
        if sample.codec not in (None, self._codec):
            wanted = f" or coded in the store's {self._codec}" if self._codec else ""
            raise ServerError(
                f"{server.url} must record states as they are{wanted}, got {sample.codec}; set store.codec to that, or "
                f"start it with {CODEC_VARIABLE}={self._codec or ''}"
            )
        self._dtypes[server.url] = sample.dtype
        self._bytes_per_token = max(self._bytes_per_token, sample.num_bytes // len(PROBE_IDS))


class _Capture:
    """One prefill per sequence, whose states come as a file."""

    def __init__(
        self, area: StagingArea, config: ServerConfig, bytes_per_token: int, recover: Callable[[Server], None]
    ) -> None:
        self.recover = recover
        self._area = area
        self._config = config
        self._bytes_per_token = bytes_per_token

    def prepare(self, job: Job) -> bool:
        if not self._area.reserve(len(job.input_ids) * self._bytes_per_token):
            return False
        job.request_id = self._area.new_request_id(len(job.input_ids))
        return True

    def run(self, server: Server, job: Job) -> None:
        life = server.life
        body = prefill_body(job.input_ids, job.request_id)
        answer = post_job(server, body, self._config.request_timeout_seconds)
        num_tokens = answer["meta_info"]["prompt_tokens"]
        if num_tokens != len(job.input_ids):
            raise JobError(f"the server must run {len(job.input_ids)} tokens, got {num_tokens}")
        try:
            self._area.wait_for(job.request_id, FILE_SECONDS, lambda: server.lives(life))
        except SampleError as error:
            if not server.lives(life):
                raise requests.ConnectionError(str(error)) from error
            raise JobError(str(error)) from error

    def collect(self, job: Job, answer: object) -> Captured | CodedCapture:
        sample = self._area.take(job.request_id)
        if not torch.equal(sample.input_ids, torch.tensor(job.input_ids, dtype=sample.input_ids.dtype)):
            raise JobError(f"the states must be those of the sequence, got {len(sample.input_ids)} other tokens")
        if sample.codec is not None:
            return CodedCapture(sample.aux, sample.last)
        return Captured(sample.aux.codes, sample.last.codes)

    def clear(self, job: Job) -> None:
        self._area.discard(job.request_id)
        self._area.release(len(job.input_ids) * self._bytes_per_token)


class _Unrecorded:
    """Requests that are not recorded, whose answer is the result."""

    def __init__(self, ask: Callable[[Server, Job], Any], recover: Callable[[Server], None]) -> None:
        self.run = ask
        self.recover = recover
        self._request_ids = request_ids()

    def prepare(self, job: Job) -> bool:
        job.request_id = self._request_ids()
        return True

    def collect(self, job: Job, answer: Any) -> Any:
        return answer

    def clear(self, job: Job) -> None:
        """Nothing was claimed."""


def _decoded(states: CodedCapture, dtype: str) -> Captured:
    hidden_size = states.last.codes.shape[1]
    return Captured(
        decode(states.aux, hidden_size, DTYPES[dtype]),
        decode(states.last, hidden_size, DTYPES[dtype]),
        aux_steps=rounding_steps(states.aux, hidden_size),
        last_steps=rounding_steps(states.last, hidden_size),
    )
