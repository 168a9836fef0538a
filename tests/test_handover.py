"""A sample's file is there when it is whole, and holds exactly its rows."""

import json
import os
import stat
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from sglang_servers import wait_for_file
from torch import Tensor

import eagle3.capture.handover as handover
from eagle3.capture.handover import Handover
from eagle3.capture.plugin import code_rows
from eagle3.capture.sample_writer import MAX_UNFINISHED
from eagle3.capture.staging import AUX_NAME, LAST_NAME, Part, error_path, partial_path, request_id, sample_path
from eagle3.capture.staging_area import read_sample
from eagle3.features.codec import Codec, encode, state_bytes

HIDDEN = 6


@dataclass(frozen=True)
class Forward:
    """What is handed over of one prefill forward."""

    parts: list[Part]
    tensors: dict[str, Tensor]


def submit(taker: Handover, forward: Forward) -> None:
    taker.submit(forward.parts, forward.tensors)


def hand_over(directory: Path, *forwards: Forward) -> Handover:
    """Returns the handover that took the forwards."""
    taker = Handover(directory)
    for forward in forwards:
        submit(taker, forward)
    return taker


def forward_of(
    *parts: Part, num_rows: int, seed: int = 0, dtype: torch.dtype = torch.bfloat16, hidden_size: int = HIDDEN
) -> Forward:
    generator = torch.Generator().manual_seed(seed)
    tensors = {"input_ids": torch.randint(99, (num_rows,), generator=generator)}
    for name in ("last_hidden_states", "aux_hidden_states.0", "aux_hidden_states.1"):
        tensors[name] = torch.randn(num_rows, hidden_size, generator=generator).to(dtype)
    return Forward(list(parts), tensors)


def error_of(directory: Path, request: str) -> str:
    return str(json.loads(wait_for_file(error_path(directory, request)).read_text())["error"])


def rows_of(forward: Forward, name: str, start: int, stop: int) -> Tensor:
    return forward.tensors[name][start:stop]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float16])
def test_rows_of_a_batch_go_to_their_own_files(tmp_path: Path, dtype: torch.dtype) -> None:
    first, second = request_id(3, "first"), request_id(4, "second")
    forward = forward_of(Part(first, 3, 0, 2, 3), Part(second, 4, 0, 7, 4), num_rows=11, dtype=dtype)
    hand_over(tmp_path, forward)
    for request, start, stop in ((first, 2, 5), (second, 7, 11)):
        path = wait_for_file(sample_path(tmp_path, request))
        content = load_file(path)  # by the library: the file is safetensors
        assert sorted(content) == sorted(forward.tensors)
        for name, tensor in content.items():
            assert torch.equal(tensor, rows_of(forward, name, start, stop)), name
        sample = read_sample(path)
        wanted = torch.cat([rows_of(forward, f"aux_hidden_states.{i}", start, stop) for i in (0, 1)], dim=1)
        assert torch.equal(sample.aux.codes, wanted)
        assert (sample.codec, sample.dtype) == (None, str(dtype).removeprefix("torch."))
        assert stat.S_IMODE(path.stat().st_mode) == 0o600


@pytest.mark.parametrize("codec", ["int8", "fp8"])
def test_coded_rows_are_the_rows_coded(tmp_path: Path, codec: Codec) -> None:
    chunked, whole = request_id(7, "chunked"), request_id(3, "whole")
    forwards = [
        forward_of(Part(chunked, 7, 0, 1, 5), num_rows=6, seed=1, hidden_size=24),
        forward_of(Part(chunked, 7, 5, 0, 2), Part(whole, 3, 0, 2, 3), num_rows=5, seed=2, hidden_size=24),
    ]
    taker = Handover(tmp_path)
    for forward in forwards:
        taker.submit(forward.parts, code_rows(forward.tensors, codec), {"codec": codec, "dtype": "bfloat16"})
    for request, pieces in ((chunked, [(0, 1, 6), (1, 0, 2)]), (whole, [(1, 2, 5)])):
        path = wait_for_file(sample_path(tmp_path, request))
        assert load_file(path)[f"{LAST_NAME}.outlier_columns"].dtype == torch.int16  # by the library
        sample = read_sample(path)
        rows = {
            name: torch.cat([rows_of(forwards[number], name, start, stop) for number, start, stop in pieces])
            for name in forwards[0].tensors
        }
        assert torch.equal(sample.input_ids, rows["input_ids"])
        aux = torch.cat([rows[f"{AUX_NAME}.{i}"] for i in (0, 1)], dim=1)
        wanted = {"aux": encode(aux, 24, codec), "last": encode(rows[LAST_NAME], 24, codec)}
        for part, states in wanted.items():
            for name, tensor in vars(states).items():
                seen = getattr(getattr(sample, part), name)
                assert seen.dtype == tensor.dtype
                assert torch.equal(seen.view(torch.uint8), tensor.view(torch.uint8)), (part, name)
        assert (sample.codec, sample.dtype) == (codec, "bfloat16")
        assert sample.num_bytes == len(sample.input_ids) * (8 + 3 * state_bytes(codec, 24))


def test_chunks_are_joined_and_nothing_shows_before_the_last(tmp_path: Path) -> None:
    request = request_id(10, "long")
    taker = Handover(tmp_path)
    bounds = [(0, 4), (4, 8), (8, 10)]
    chunks = [forward_of(Part(request, 10, start, 1, stop - start), num_rows=5, seed=start) for start, stop in bounds]
    for chunk in chunks[:2]:
        submit(taker, chunk)
    wait_for_file(partial_path(tmp_path, request))
    time.sleep(0.05)
    assert not sample_path(tmp_path, request).exists()
    submit(taker, chunks[2])
    sample = read_sample(wait_for_file(sample_path(tmp_path, request)))
    wanted = [rows_of(chunk, "last_hidden_states", 1, 1 + b - a) for chunk, (a, b) in zip(chunks, bounds, strict=True)]
    assert torch.equal(sample.last.codes, torch.cat(wanted))
    assert [path.name for path in tmp_path.iterdir()] == [f"{request}.safetensors"]


def test_request_that_the_scheduler_runs_again_begins_anew(tmp_path: Path) -> None:
    request = request_id(5, "again")
    taker = Handover(tmp_path)
    submit(taker, forward_of(Part(request, 5, 0, 0, 3), num_rows=3, seed=1))
    whole = forward_of(Part(request, 5, 0, 0, 5), num_rows=5, seed=2)
    submit(taker, whole)
    sample = read_sample(wait_for_file(sample_path(tmp_path, request)))
    assert torch.equal(sample.input_ids, whole.tensors["input_ids"])


@pytest.mark.parametrize(
    ("parts", "message"),
    [
        ([(3, 2)], "must begin at token 0, got token 3: the prefix came from the server's prefix cache"),
        ([(0, 2), (3, 2)], "the next part must begin at token 2, got token 3"),
        ([(0, 2), (2, 4)], "must have the 5 tokens that its id announces, got 6"),
    ],
)
def test_sample_with_a_hole_is_an_error(tmp_path: Path, parts: list[tuple[int, int]], message: str) -> None:
    request = request_id(5, "hole")
    taker = Handover(tmp_path)
    for start, num_rows in parts:
        submit(taker, forward_of(Part(request, 5, start, 0, num_rows), num_rows=num_rows))
    assert message in error_of(tmp_path, request)
    # What still comes of it neither makes a file nor another error.
    submit(taker, forward_of(Part(request, 5, 4, 0, 1), num_rows=1))
    other = request_id(1, "other")
    submit(taker, forward_of(Part(other, 1, 0, 0, 1), num_rows=1))
    wait_for_file(sample_path(tmp_path, other))
    assert message in error_of(tmp_path, request)
    assert not sample_path(tmp_path, request).exists()
    assert not partial_path(tmp_path, request).exists()


def test_file_that_cannot_be_written_is_an_error_of_that_sample(tmp_path: Path) -> None:
    request, other = request_id(2, "blocked"), request_id(2, "free")
    partial_path(tmp_path, request).mkdir()  # stands for a full disk
    taker = Handover(tmp_path)
    submit(taker, forward_of(Part(request, 2, 0, 0, 2), Part(other, 2, 0, 2, 2), num_rows=4))
    assert f"the staging directory {tmp_path} must take the sample, got" in error_of(tmp_path, request)
    wait_for_file(sample_path(tmp_path, other))


def test_aborted_requests_do_not_pile_up(tmp_path: Path) -> None:
    taker = Handover(tmp_path)
    requests = [request_id(9, f"r{i}") for i in range(MAX_UNFINISHED + 1)]
    for request in requests:
        submit(taker, forward_of(Part(request, 9, 0, 0, 1), num_rows=1))
    assert "the rest of the request never came" in error_of(tmp_path, requests[0])
    assert not partial_path(tmp_path, requests[0]).exists()
    assert partial_path(tmp_path, requests[1]).exists()


def test_a_forward_of_many_short_prompts_is_written_whole(tmp_path: Path) -> None:
    num_prompts = 2 * MAX_UNFINISHED + 7
    requests = [request_id(2, f"r{i}") for i in range(num_prompts)]
    forward = forward_of(*(Part(each, 2, 0, 2 * i, 2) for i, each in enumerate(requests)), num_rows=2 * num_prompts)
    hand_over(tmp_path, forward)
    for i, request in enumerate(requests):
        content = load_file(wait_for_file(sample_path(tmp_path, request)))
        for name, tensor in content.items():
            assert torch.equal(tensor, rows_of(forward, name, 2 * i, 2 * i + 2)), (request, name)
    assert len(list(tmp_path.iterdir())) == num_prompts


def submit_until_refused(taker: Handover, forward: Forward) -> None:
    for _ in range(1000):
        submit(taker, forward)
        time.sleep(0.005)


def test_dead_writer_is_told_to_the_next_forward(tmp_path: Path) -> None:
    directory = tmp_path / "gone"
    directory.mkdir()
    taker = Handover(directory)
    directory.rmdir()
    forward = forward_of(Part(request_id(1, "x"), 1, 0, 0, 1), num_rows=1)
    submit(taker, forward)
    with pytest.raises(RuntimeError, match=r"the process that writes captured states died \(exit code 1\)"):
        submit_until_refused(taker, forward)


def test_forward_waits_while_the_writer_is_far_behind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(handover, "MAX_MEMORY_BYTES", 1)
    taker = Handover(tmp_path)
    requests = [request_id(50, f"r{i}") for i in range(20)]
    for request in requests:  # each is larger than the limit and passes alone
        submit(taker, forward_of(Part(request, 50, 0, 0, 50), num_rows=50))
    # When the last is taken, the one before it is written.
    assert all(sample_path(tmp_path, request).exists() for request in requests[:-1])
    wait_for_file(sample_path(tmp_path, requests[-1]))
    assert len(os.listdir(tmp_path)) == 20


def test_forwards_of_any_size_find_their_place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(handover, "MAX_MEMORY_BYTES", 4096)
    generator = torch.Generator().manual_seed(0)
    taker = Handover(tmp_path)
    forwards = {}
    for i in range(60):  # from a few bytes to more than the memory may usually have
        num_rows = int(torch.randint(1, 2 + 3 * i, (), generator=generator))
        request = request_id(num_rows, f"r{i}")
        forwards[request] = forward_of(Part(request, num_rows, 0, 0, num_rows), num_rows=num_rows, seed=i)
        submit(taker, forwards[request])
    for request, forward in forwards.items():
        content = load_file(wait_for_file(sample_path(tmp_path, request)))
        for name, tensor in forward.tensors.items():
            assert torch.equal(content[name], tensor), (request, name)


def test_writing_process_ends_with_its_server(tmp_path: Path) -> None:
    code = (
        "import os, sys; from pathlib import Path; from eagle3.capture.handover import Handover; "
        "print(Handover(Path(sys.argv[1]))._process.pid, flush=True); os.kill(os.getpid(), 9)"
    )
    ended = subprocess.run([sys.executable, "-c", code, str(tmp_path)], capture_output=True, text=True, check=False)
    deadline = time.monotonic() + 10
    while Path(f"/proc/{int(ended.stdout)}").exists():
        assert time.monotonic() < deadline, ended.stdout
        time.sleep(0.01)
