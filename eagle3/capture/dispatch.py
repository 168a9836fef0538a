"""Keeps servers busy: a bounded number of jobs in flight, tried again where that can help.

Only the calling thread decides anything; the others wait for answers. So a server is started again by the thread that
lives longest, and a generator of jobs runs where its owner iterates.
"""

import logging
import queue
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Generic, Protocol, TypeVar

import requests

from eagle3.capture.engine import SetAside
from eagle3.capture.launch import ServerError
from eagle3.capture.server import Server

logger = logging.getLogger(__name__)

TRIES = 2  # of a job that fails by itself
MAX_RESTARTS = 3  # of a server that finishes nothing in between

Result = TypeVar("Result")
Result_co = TypeVar("Result_co", covariant=True)


class JobError(Exception):
    """A job failed, and not for want of a server; the message says why."""


@dataclass(eq=False)
class Job:
    """One sequence on its way."""

    index: int  # its place among the jobs
    input_ids: list[int]
    request_id: str = ""  # of this try
    num_failures: int = 0


class Task(Protocol[Result_co]):
    """What is done with each job."""

    def prepare(self, job: Job) -> bool:
        """Claims what the job needs and gives it a request id; False as long as there is no room for it."""

    def run(self, server: Server, job: Job) -> object:
        """Asks a server, on a thread of its own; a JobError fails the job, a RequestException says nobody answered."""

    def collect(self, job: Job, answer: object) -> Result_co:
        """Turns the answer into the result, or raises a JobError."""

    def clear(self, job: Job) -> None:
        """Gives back what `prepare` claimed."""

    def recover(self, server: Server) -> None:
        """Brings a server that did not answer back, or raises."""


@dataclass(eq=False)
class _Lane:
    """One server and its share of the jobs."""

    server: Server
    pool: ThreadPoolExecutor
    num_in_flight: int = 0
    num_recoveries: int = 0
    num_in_vain: int = 0  # recoveries since it last finished a job


@dataclass(frozen=True)
class _Flight:
    job: Job
    lane: _Lane
    num_recoveries: int  # of the lane when it began: what was lost before the last one is no news


@dataclass
class _Backlog:
    """Jobs that are to be sent, in the order of their turn."""

    fresh: Iterator[Job]
    again: deque[Job] = field(default_factory=deque)
    # In flight when a server was lost. Each goes alone: if the server is lost again, it was that job.
    suspects: deque[Job] = field(default_factory=deque)
    alone: Job | None = None  # the suspect in flight

    def next(self, num_in_flight: int) -> Job | None:
        """Returns the job whose turn it is, None if there is none, or it must wait."""
        if self.alone is not None:
            return None
        if self.suspects:
            if num_in_flight:
                return None
            self.alone = self.suspects.popleft()
            return self.alone
        return self.again.popleft() if self.again else next(self.fresh, None)

    def put_back(self, job: Job) -> None:
        """Makes it this job's turn again."""
        if job is self.alone:
            self.alone = None
            self.suspects.appendleft(job)
        else:
            self.again.appendleft(job)


class Dispatcher(Generic[Result]):
    """Runs one task's jobs over servers."""

    def __init__(self, servers: Sequence[Server], max_requests: int, task: Task[Result]) -> None:
        self._lanes = [_Lane(server, ThreadPoolExecutor(max_requests)) for server in servers]
        self._max_requests = max_requests
        self._task = task
        self._flights: dict[Future[object], _Flight] = {}
        self._landed: queue.SimpleQueue[Future[object]] = queue.SimpleQueue()

    def run(self, jobs: Iterable[Job]) -> Iterator[tuple[Job, Result | SetAside]]:
        """Yields each job once, as it ends.

        Raises:
            ServerError: a server stays away.
        """
        backlog = _Backlog(iter(jobs))
        try:
            while True:
                self._send(backlog)
                if not self._flights:
                    return
                future = self._landed.get()
                job, result = self._land(self._flights.pop(future), future, backlog)
                if result is not None:
                    yield job, result
        finally:
            self._abandon()

    def _send(self, backlog: _Backlog) -> None:
        """Sends jobs as long as there are some, servers are free for them and there is room."""
        while True:
            lane = min(self._lanes, key=lambda lane: lane.num_in_flight)
            if lane.num_in_flight == self._max_requests:
                return
            job = backlog.next(len(self._flights))
            if job is None:
                return
            if not self._task.prepare(job):
                backlog.put_back(job)
                assert self._flights, f"no room for the only job, of {len(job.input_ids)} tokens"
                return
            lane.num_in_flight += 1
            future = lane.pool.submit(self._task.run, lane.server, job)
            self._flights[future] = _Flight(job, lane, lane.num_recoveries)
            future.add_done_callback(self._landed.put)

    def _land(self, flight: _Flight, future: Future[object], backlog: _Backlog) -> tuple[Job, Result | SetAside | None]:
        """Returns a job's result, None if it is to be tried again."""
        job, lane = flight.job, flight.lane
        lane.num_in_flight -= 1
        was_alone = job is backlog.alone
        if was_alone:
            backlog.alone = None
        try:
            result = self._task.collect(job, future.result())
        except JobError as error:
            lane.num_in_vain = 0
            job.num_failures += 1
            if job.num_failures == TRIES:
                return job, SetAside(str(error))
            logger.info("trying a sequence of %d tokens again: %s", len(job.input_ids), error)
            backlog.again.append(job)
            return job, None
        except requests.RequestException as error:
            if flight.num_recoveries == lane.num_recoveries:
                self._recover(lane, error)
            if was_alone:
                return job, SetAside(f"the server did not survive it ({type(error).__name__})")
            backlog.suspects.append(job)
            return job, None
        finally:
            self._task.clear(job)
        lane.num_in_vain = 0
        return job, result

    def _recover(self, lane: _Lane, error: requests.RequestException) -> None:
        lane.num_recoveries += 1
        lane.num_in_vain += 1
        if lane.num_in_vain > MAX_RESTARTS:
            raise ServerError(
                f"a server must finish a sequence between two failures, got {lane.num_in_vain} failures in a row "
                f"({lane.server.url}, {error!r}); see its log"
            )
        logger.warning("%s does not answer (%s)", lane.server.url, type(error).__name__)
        self._task.recover(lane.server)

    def _abandon(self) -> None:
        """Ends what is in flight, if the caller stopped early."""
        gone: set[_Lane] = set()  # a server that hangs is asked once, not once for each of its requests
        for flight in self._flights.values():
            if flight.lane not in gone and not flight.lane.server.abort(flight.job.request_id):
                gone.add(flight.lane)
        for lane in self._lanes:
            lane.pool.shutdown(cancel_futures=True)
        for flight in self._flights.values():
            self._task.clear(flight.job)
