"""Each job ends once, servers are neither idle nor flooded, and one bad job takes no other with it."""

import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator

import pytest
import requests

from eagle3.capture.dispatch import MAX_RESTARTS, Dispatcher, Job, JobError
from eagle3.capture.engine import SetAside
from eagle3.capture.launch import ServerError
from eagle3.capture.server import Server


class FakeServer(Server):
    """Answers nothing itself; the task decides what happens."""

    def __init__(self, name: str = "a") -> None:
        super().__init__(f"http://{name}")
        self.aborted: list[str] = []
        self.num_recoveries = 0
        self.hangs = False

    def abort(self, request_id: str) -> bool:
        self.aborted.append(request_id)
        return not self.hangs


class FakeTask:
    """Runs `behave(server, job)` on the threads and keeps count of what it holds."""

    def __init__(self, behave: Callable[[FakeServer, Job], None], room: int = 1000) -> None:
        self._behave = behave
        self._room = room
        self.held: set[int] = set()
        self.most_held = 0
        self.tries: Counter[int] = Counter()

    def prepare(self, job: Job) -> bool:
        if self.held and len(self.held) >= self._room:
            return False
        self.held.add(job.index)
        self.most_held = max(self.most_held, len(self.held))
        self.tries[job.index] += 1
        job.request_id = f"r{job.index}"
        return True

    def run(self, server: Server, job: Job) -> str:
        assert isinstance(server, FakeServer)
        self._behave(server, job)
        return server.url

    def collect(self, job: Job, answer: object) -> str:
        return f"{job.index} by {answer}"

    def clear(self, job: Job) -> None:
        self.held.remove(job.index)

    def recover(self, server: Server) -> None:
        assert isinstance(server, FakeServer)
        server.num_recoveries += 1


def jobs(count: int) -> Iterator[Job]:
    return (Job(index, [1, 2]) for index in range(count))


def nap(_server: FakeServer, _job: Job) -> None:
    time.sleep(0.001)


def collect(
    task: FakeTask, servers: list[FakeServer], todo: Iterable[Job], max_requests: int = 4
) -> dict[int, str | SetAside]:
    results: dict[int, str | SetAside] = {}
    for job, result in Dispatcher(servers, max_requests, task).run(todo):
        assert job.index not in results
        results[job.index] = result
    assert task.held == set()
    return results


def test_each_job_ends_once_and_servers_share_them() -> None:
    def behave(server: FakeServer, job: Job) -> None:
        time.sleep(0.002 if server.url == "http://slow" else 0.0002)

    results = collect(FakeTask(behave), [FakeServer("slow"), FakeServer("fast")], jobs(100))
    assert sorted(results) == list(range(100))
    shares = Counter(str(result).split()[-1] for result in results.values())
    assert shares["http://fast"] > shares["http://slow"] > 0


def test_no_more_are_in_flight_than_allowed() -> None:
    lock, running, most = threading.Lock(), Counter[str](), Counter[str]()

    def behave(server: FakeServer, job: Job) -> None:
        with lock:
            running[server.url] += 1
            most[server.url] = max(most[server.url], running[server.url])
        time.sleep(0.002)
        with lock:
            running[server.url] -= 1

    collect(FakeTask(behave), [FakeServer("a"), FakeServer("b")], jobs(40), max_requests=3)
    assert most == {"http://a": 3, "http://b": 3}


def test_jobs_wait_for_room() -> None:
    task = FakeTask(nap, room=2)
    assert len(collect(task, [FakeServer()], jobs(20))) == 20
    assert task.most_held == 2


def test_jobs_are_taken_as_they_are_needed() -> None:
    taken = []

    def source() -> Iterator[Job]:
        for job in jobs(50):
            taken.append(job.index)
            yield job

    run = Dispatcher([FakeServer()], 4, FakeTask(nap)).run(source())
    next(run)
    assert len(taken) <= 6
    run.close()  # type: ignore[attr-defined] # it is a generator


def test_job_that_fails_is_tried_once_more_and_set_aside() -> None:
    def behave(_server: FakeServer, job: Job) -> None:
        if job.index == 3 or (job.index == 5 and job.num_failures == 0):
            raise JobError(f"no {job.index}")

    task = FakeTask(behave)
    results = collect(task, [FakeServer()], jobs(8))
    assert results[3] == SetAside("no 3")
    assert results[5] == "5 by http://a"
    assert task.tries == {0: 1, 1: 1, 2: 1, 3: 2, 4: 1, 5: 2, 6: 1, 7: 1}


def test_job_that_kills_servers_is_set_aside_and_no_other() -> None:
    dead = threading.Event()

    def behave(server: FakeServer, job: Job) -> None:
        if job.index == 10:
            dead.set()
        time.sleep(0.001)
        if dead.is_set() or job.index == 10:
            raise requests.ConnectionError("refused")

    class Reviving(FakeTask):
        def recover(self, server: Server) -> None:
            super().recover(server)
            dead.clear()

    server = FakeServer()
    results = collect(Reviving(behave), [server], jobs(30))
    assert results.pop(10) == SetAside("the server did not survive it (ConnectionError)")
    assert sorted(results) == [index for index in range(30) if index != 10]
    assert all(isinstance(result, str) for result in results.values())
    assert server.num_recoveries == 2  # among others, then alone


def test_server_that_finishes_nothing_is_given_up() -> None:
    def behave(_server: FakeServer, _job: Job) -> None:
        raise requests.ConnectionError("refused")

    server = FakeServer()
    with pytest.raises(ServerError, match=rf"between two failures, got {MAX_RESTARTS + 1} failures in a row .http://a"):
        collect(FakeTask(behave), [server], jobs(50))
    assert server.num_recoveries == MAX_RESTARTS


@pytest.mark.parametrize("hangs", [False, True])
def test_stopping_early_aborts_what_is_in_flight_and_asks_a_silent_server_once(hangs: bool) -> None:
    aborted = threading.Event()

    class Patient(FakeServer):
        def abort(self, request_id: str) -> bool:
            aborted.set()
            return super().abort(request_id)

    def behave(_server: FakeServer, job: Job) -> None:
        assert job.index == 0 or aborted.wait(timeout=10)

    server, task = Patient(), FakeTask(behave)
    server.hangs = hangs
    run = Dispatcher([server], 3, task).run(jobs(20))
    assert next(run)[0].index == 0
    run.close()  # type: ignore[attr-defined] # it is a generator
    assert len(server.aborted) == 1 if hangs else set(server.aborted) >= {"r1", "r2"}
    assert task.held == set()


def test_error_of_the_source_ends_the_run() -> None:
    def source() -> Iterator[Job]:
        yield from jobs(3)
        raise ValueError("bad row")

    task = FakeTask(nap)
    with pytest.raises(ValueError, match="bad row"):
        collect(task, [FakeServer()], source())
    assert task.held == set()
