"""A document that is split over ranks gives the loss and the gradients of the whole one."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from conftest import random_sample

from eagle3.draft.ttt import pack
from eagle3.features.codec import encode
from eagle3.training.packs import CodedPack
from eagle3.training.sequence_split import Ranks, cut, share_of

TESTS = Path(__file__).resolve().parent


def split_differences(out: Path, num_ranks: int, device: str, *cases: str) -> dict[str, list[float]]:
    """Launches ranks that score documents whole and split; returns relative differences by case."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={num_ranks}"]
    env = os.environ | {"PYTHONPATH": f"{TESTS.parent}:{TESTS}", "OMP_NUM_THREADS": "1"}
    env["PYTHONPATH"] += ":" + os.environ.get("PYTHONPATH", "")
    done = subprocess.run(
        [*command, str(TESTS / "split_ranks.py"), str(out), device, *cases],
        env=env, capture_output=True, text=True, timeout=240, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-4000:]
    found: dict[str, list[float]] = json.loads(out.read_text())
    return found


@pytest.mark.parametrize(("num_ranks", "cases"), [(2, []), (3, ["one answer", "three answers"])])
def test_loss_and_gradients_are_those_of_the_whole_document(num_ranks: int, cases: list[str], tmp_path: Path) -> None:
    differences = split_differences(tmp_path / "differences.json", num_ranks, "cpu", *cases)
    assert len(differences) == (len(cases) or 7)
    for name, values in differences.items():
        assert len(values) == 3 + 13, name  # loss, two sums, every parameter
        # fp64, other summation order; acceptance is summed in fp32 by row.
        assert max(values) < 1e-6, (name, values)
        assert max(values[3:]) < 1e-11, (name, values)


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_two_gpus_give_the_whole_documents_gradients(tmp_path: Path) -> None:
    facts = split_differences(tmp_path / "differences.json", 2, "cuda", "a long answer")
    print(facts)
    assert max(facts["a long answer"]) < 1e-4, facts  # fp32, other summation order
    # bf16 errs as much as without a split, and no more.
    for split, whole in zip(facts["a long answer, bf16"], facts["a long answer, bf16, whole"], strict=True):
        assert split < 1.3 * whole + 1e-3, facts


def test_pieces_have_as_many_rows_each_and_a_rank_one_from_each_end() -> None:
    counted = torch.cat([torch.arange(10, 22), torch.arange(40, 44)])  # 16 rows
    cuts = cut(counted, 50, size=2)
    assert cuts.bounds == (0, 14, 18, 40, 50)
    assert [cuts.pieces(rank) for rank in range(2)] == [[0, 3], [1, 2]]
    assert sorted(torch.cat([cuts.tokens(rank) for rank in range(2)]).tolist()) == list(range(50))
    assert cuts.width == 26
    with pytest.raises(AssertionError, match=r"\(3, 4\)"):
        cut(counted[:3], 50, size=2)


def test_a_share_holds_its_rows_and_what_they_read() -> None:
    sample = random_sample("s", [0] * 10 + [1] * 20, hidden_size=64)
    whole = CodedPack.of(pack([sample]))
    shares = [share_of(whole, Ranks(rank, 2, None), ttt_steps=3) for rank in range(2)]
    tokens = [share.tokens for share in shares]
    counted = [[t.positions[rows] for rows in t.counted(3)] for t in tokens]
    for step, rows in enumerate(whole.tokens.counted(3)):
        assert sorted(torch.cat([each[step] for each in counted]).tolist()) == rows.tolist()
    for share in shares:
        assert torch.equal(share.aux.codes, sample.aux_hidden_states[share.tokens.positions])
        places = share.tokens.positions[share.tokens.target_rows]
        assert torch.equal(share.last.codes, sample.last_hidden_states[torch.searchsorted(sample.last_rows, places)])
    assert tokens[0].document_lengths == (13 + 4, 7)  # to the end of the document there is nothing to read
    assert tokens[0].sample_ids == ("s", "s")


def test_coded_states_are_split_as_they_are_stored() -> None:
    sample = random_sample("s", [0] * 10 + [1] * 20, hidden_size=64)
    whole = CodedPack.of(pack([sample]))
    coded = CodedPack(whole.tokens, encode(whole.aux.codes, 64, "int8"), encode(whole.last.codes, 64, "int8"),
                      torch.float32, 64)  # fmt: skip
    share, decoded = share_of(coded, Ranks(1, 2, None), ttt_steps=3), coded.decoded()
    part = share.decoded()
    assert torch.equal(part.aux_hidden_states, decoded.aux_hidden_states[part.positions])


def test_a_document_is_split_when_every_piece_gets_a_row() -> None:
    assert Ranks(0, 2, None).can_split(4)
    assert not Ranks(0, 2, None).can_split(3)
    assert not Ranks(0, 1, None).can_split(100)
    assert Ranks.of(0, 1) == Ranks(0, 1, None)
