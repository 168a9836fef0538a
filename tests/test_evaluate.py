"""evaluate.py end to end, on a tiny target in this process and against a server's counters."""

import json
import logging
import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from target_stores import LAYERS, write_target_store
from tiny_drafters import random_drafter
from transformers import AutoModelForCausalLM

from eagle3.config import EvaluateConfig, UserError
from eagle3.config_file import load_config
from eagle3.draft.export import export_drafter
from eagle3.draft.questions import read_questions
from eagle3.draft.target_weights import load_target_config
from eagle3.evaluation import serving_charts
from eagle3.evaluation.decoder import Answer
from eagle3.evaluation.local import decoded_rounds
from eagle3.evaluation.run import evaluate
from eagle3.evaluation.served import ServedAnswer, ServerFacts, SGLangClient
from eagle3.evaluation.target import LocalTarget
from eagle3.features.record import FeatureSample, is_held_out
from eagle3.tracking import digest_file

ROOT = Path(__file__).resolve().parent.parent
SPECULATIVE: dict[str, Any] = {"speculative_algorithm": "EAGLE3"}


@pytest.fixture(scope="module")
def drafter(tiny_target: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    model = AutoModelForCausalLM.from_pretrained(tiny_target, dtype=torch.float32)
    directory = tmp_path_factory.mktemp("drafter") / "drafter"
    export_drafter(
        random_drafter(LocalTarget(model, LAYERS, frozenset()), 200),
        directory,
        target_config=load_target_config(tiny_target),
        card="",
        dtype=torch.float32,
    )
    return directory


def test_an_evaluation_explains_what_it_finds(
    tmp_path: Path, tiny_target: Path, drafter: Path, prompts: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    broken = Path(shutil.copytree(drafter, tmp_path / "drafter"))
    values = json.loads((broken / "config.json").read_text()) | {"max_position_embeddings": 100}
    (broken / "config.json").write_text(json.dumps(values))
    target = {"target.path": tiny_target, "target.dtype": "float32", "target.device": "cpu", "timed_prompts": 0}
    result = evaluate(settings(tmp_path / "out", prompts, **target, drafter=broken, explain="true"))
    # A random target's head, which a drafter of it starts with, looks random.
    assert [finding.partition(":")[0] for finding in result["findings"]] == ["random-head", "context-length"]
    finding = result["findings"][1]
    assert finding.startswith("context-length: max_position_embeddings is 100 and the target's 512")
    assert "; remedy: write 512 into config.json" in finding
    table, _, findings = capsys.readouterr().out.partition("1. random-head: ")
    assert "Acceptance length tau" in table
    assert "context-length" not in table
    assert "2. context-length: " in findings
    assert "Not looked at: what a server accepts (server=URL)." in findings
    assert findings.count("max_position_embeddings is 100 and") == 1  # and no second time, as a warning
    with pytest.raises(UserError, match="drafter must name a directory with explain=true, got null"):
        evaluate(settings(tmp_path / "out", prompts, server="http://127.0.0.1:9", explain="true"))


def test_figures_that_will_be_replaced_are_said(
    tmp_path: Path, tiny_target: Path, drafter: Path, prompts: Path, caplog: pytest.LogCaptureFixture
) -> None:
    target = {"target.path": tiny_target, "target.dtype": "float32", "target.device": "cpu", "timed_prompts": 0}
    config = settings(tmp_path / "out", prompts, **target, drafter=drafter)
    evaluate(config)
    assert "replaced" not in caplog.text
    result = tmp_path / "out" / "result.json"
    written = time.mktime((2026, 1, 2, 3, 4, 5, 0, 0, -1))
    os.utime(result, (written, written))
    evaluate(config)
    assert [line for line in caplog.messages if "replaced" in line] == [
        f"the figures that an evaluation wrote 2026-01-02 03:04:05 will be replaced ({result}); to keep them, name "
        f"another out"
    ]


@pytest.mark.parametrize(("share", "warns"), [("0.9", True), ("0.8", False), ("0.7", False), ("null", False)])
def test_prompts_that_the_drafter_was_trained_on_are_said(
    tmp_path: Path,
    tiny_target: Path,
    drafter: Path,
    prompts: Path,
    caplog: pytest.LogCaptureFixture,
    share: str,
    warns: bool,
) -> None:
    copy = shutil.copytree(drafter, tmp_path / "run" / "drafter")
    run = {"id": "r", "name": "n", "group": "g", "job_type": "train"}
    record = {"sessions": [{"run": run, "config": {"data": {"held_out_share": 0.8}}}]}
    (tmp_path / "run" / "run.json").write_text(json.dumps(record))
    target = {"target.path": tiny_target, "target.dtype": "float32", "target.device": "cpu", "timed_prompts": 0}
    config = settings(tmp_path / "out", prompts, **target, drafter=copy, held_out_share=share)
    evaluate(config)
    said = (
        f"held_out_share is 0.9, and the drafter's training held out 0.8 ({tmp_path / 'run' / 'run.json'}): of its own "
        f"prompts, some that it was trained on are asked"
    )
    assert [line for line in caplog.messages if "held_out_share" in line] == ([said] if warns else [])


@pytest.fixture(scope="module")
def prompts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("prompts") / "prompts.jsonl"
    questions = ["what is it?", "name ten of them", "the last one is", "list"]
    rows = [{"id": f"p{i}", "messages": [{"role": "user", "content": text}]} for i, text in enumerate(questions)]
    rows[1]["messages"].append({"role": "user", "content": "and then?"})  # type: ignore[attr-defined] # a list
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def settings(out: Path, prompts: Path, **values: Any) -> EvaluateConfig:
    named = {"prompts.path": prompts, "out": out, "max_new_tokens": 12, "batch_size": 3, "timed_prompts": 2} | values
    return load_config(EvaluateConfig, None, [f"{name}={value}" for name, value in named.items()])


def test_a_local_evaluation_writes_every_figure(
    tmp_path: Path, tiny_target: Path, drafter: Path, prompts: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    target = {"target.path": tiny_target, "target.dtype": "float32", "target.device": "cpu"}
    config = settings(tmp_path / "out", prompts, **target, drafter=drafter, compare_untrained="true")
    result = evaluate(config)
    assert json.loads((tmp_path / "out" / "result.json").read_text()) == result
    assert (result["num_conversations"], result["num_answers"]) == (4, 5)
    # fp32: the simulator follows the very rounds that were decoded.
    assert result["simulated"] == result["trained"]
    trained, untrained = result["trained"]["all_answers"], result["untrained"]["all_answers"]
    assert trained["num_answers"] == untrained["num_answers"] == 5
    assert trained["num_tokens"] == untrained["num_tokens"] <= 5 * 12
    assert result["tau_trained"] == trained["num_tokens"] / trained["rounds"]
    assert result["speed"]["num_equal_answers"] == result["speed"]["num_prompts"] == 2
    assert result["tokens_per_second_plain"] > 0
    assert set(result["seconds"]) == {"load", "decode", "decode_untrained", "simulate", "time"}
    assert result["peak_memory_bytes"] > 2**20
    assert result["config"]["max_new_tokens"] == 12
    assert result["drafter_config"] == json.loads((drafter / "config.json").read_text())
    assert len(result["chat_template_digest"]) == 32
    questions = read_questions(tmp_path / "out" / "questions.jsonl")
    assert set(questions) == {"trained", "untrained", "simulated"}
    assert [each.answer.sample_id for each in questions["trained"]] == ["p0", "p1", "p2", "p3", "p1"]
    assert sum(each.answer.num_tokens for each in questions["untrained"]) == untrained["num_tokens"]
    assert sum(each.answer.rounds for each in questions["untrained"]) == untrained["rounds"]
    assert questions["trained"] == questions["simulated"]
    (session,) = json.loads((tmp_path / "out" / "run.json").read_text())["sessions"]
    assert session["config"] == result["config"]
    assert session["digests"]["drafter"] == digest_file(drafter / "model.safetensors")
    assert session["digests"]["prompts"] == digest_file(prompts)
    shown = capsys.readouterr().out
    assert f"{result['tau_trained']:.3f}" in shown
    assert "result.json" in shown


def test_the_log_says_which_drafter_is_decoded_with(
    tmp_path: Path, tiny_target: Path, drafter: Path, prompts: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    target = {"target.path": tiny_target, "target.dtype": "float32", "target.device": "cpu"}
    evaluate(settings(tmp_path / "out", prompts, **target, drafter=drafter, compare_untrained="true"))
    begun = [line for line in caplog.messages if re.fullmatch(r".*: \d+ (answers?|prompts)", line)]
    assert begun == [
        "decoding with the trained drafter: 4 answers",
        "decoding with the trained drafter: 1 answer",  # second turns
        "decoding with the untrained drafter: 5 answers",
        "simulating the same answers: 5 answers",
        "timing one stream, plain and with the trained drafter: 2 prompts",
    ]


def test_a_served_evaluation_reads_the_servers_counters(
    tmp_path: Path, tiny_target: Path, prompts: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    facts = ServerFacts("http://host", "0.5.23", str(tiny_target), SPECULATIVE | {"speculative_num_steps": 5})
    asked: list[tuple[int, int]] = []

    def answer_all(
        client: SGLangClient, prompts: list[list[int]], concurrency: int, on_answer: Callable[[ServedAnswer], None]
    ) -> list[ServedAnswer]:
        asked.append((len(prompts), concurrency))
        return [ServedAnswer([5, 6, 7, 2], 4, 3, [3])] * len(prompts)

    # The network is the one thing that is stood in for; test_served.py has the client itself.
    monkeypatch.setattr(SGLangClient, "facts", lambda client: facts)
    monkeypatch.setattr(SGLangClient, "answer_all", answer_all)
    result = evaluate(settings(tmp_path / "out", prompts, server="http://host", drafter="null"))
    assert asked == [(4, 3), (1, 3)]
    assert result["tau_trained"] == 4 / 3
    assert result["num_draft_tokens"] == 5
    assert result["server"]["version"] == "0.5.23"
    assert len(result["findings"]) == 1
    assert result["speed"] is None
    elsewhere = ServerFacts("http://host", "0.5.23", "/not/on/this/machine", SPECULATIVE)
    monkeypatch.setattr(SGLangClient, "facts", lambda client: elsewhere)
    with pytest.raises(UserError, match=r"target.path must name the served model's directory, since .*/not/on/this"):
        evaluate(settings(tmp_path / "out", prompts, server="http://host"))
    evaluate(settings(tmp_path / "out", prompts, server="http://host", **{"target.path": tiny_target}))


def test_a_store_is_simulated_with_and_without_the_target_in_this_process(
    tmp_path: Path,
    tiny_target: Path,
    drafter: Path,
    prompts: Path,
    make_sample: Callable[..., FeatureSample],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    samples = [make_sample(f"s{i}", [0, 0, 1, 1, 1, 1], seed=i) for i in range(3)]
    write_target_store(tmp_path / "store", tiny_target, samples)
    both = {"drafter": drafter, "store": tmp_path / "store", "target.path": tiny_target, "target.dtype": "float32"}
    local = evaluate(settings(tmp_path / "local", prompts, timed_prompts=0, **both))
    assert local["simulated_store"]["all_answers"]["num_tokens"] == 12
    assert local["speed"] is None
    facts = ServerFacts("http://host", "0.5.23", str(tiny_target), SPECULATIVE)
    monkeypatch.setattr(SGLangClient, "facts", lambda client: facts)
    monkeypatch.setattr(
        SGLangClient, "answer_all", lambda client, prompts, *rest: [ServedAnswer([5, 2], 2, 1, [1])] * len(prompts)
    )
    served = evaluate(settings(tmp_path / "served", prompts, server="http://host", **both))
    assert served["simulated_store"] == local["simulated_store"]


def test_contradicting_settings_are_refused_together(tmp_path: Path, prompts: Path) -> None:
    bad = {"max_new_tokens": 0, "batch_size": 0, "held_out_share": 1.5, "max_prompts": 0, "timed_prompts": -1}
    nested = {"speculation.num_draft_tokens": 0, "prompts.too_long": "split", "prompts.train_on": "last"}
    with pytest.raises(UserError) as error:
        evaluate(settings(tmp_path, prompts, **bad, **nested))
    message = str(error.value)
    assert "target.path must name the target, got none" in message
    assert "drafter must name a directory in SGLang's format, got null" in message
    for name in ("speculation.num_draft_tokens", "batch_size", "max_prompts"):
        assert f"{name} must be 1 or more, got 0" in message
    assert "max_new_tokens must be 2 or more, got 0; the first token comes from prefill" in message
    assert "timed_prompts must be 0 or more, got -1" in message
    assert "prompts.too_long must be 'drop' in an evaluation, got 'split'; it is for given answers" in message
    assert "prompts.train_on must be 'all' in an evaluation, got 'last'; it is for given answers" in message
    assert "held_out_share must be above 0 and at most 1, got 1.5" in message
    with pytest.raises(UserError) as error:
        evaluate(settings(tmp_path, prompts, server="http://host", store="s", compare_untrained="true"))
    assert "target.path must name the target to simulate over a store, got none" in str(error.value)
    assert "compare_untrained must be false with --server, got true" in str(error.value)


def test_what_is_wrong_with_out_shows_before_the_work(tmp_path: Path, tiny_target: Path, prompts: Path) -> None:
    (tmp_path / "run.json").write_text("{")
    with pytest.raises(UserError, match=r"run\.json must be JSON with a list of sessions"):
        evaluate(settings(tmp_path, prompts, drafter=tmp_path / "none", **{"target.path": tiny_target}))


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ({"drafter": "nowhere"}, "config.json"),
        ({"prompts.path": "nowhere"}, "prompts"),
        ({"target.path": "nowhere"}, "config.json"),
        ({"store": "nowhere"}, "a feature store must hold manifest.json"),
        ({"server": "http://127.0.0.1:9"}, "--server must be the URL of a running server"),
        ({"serve.concurrency": [1], "drafter": "nowhere"}, "config.json"),
        ({"serve.concurrency": [1], "prompts.path": "nowhere"}, "prompts"),
    ],
)
def test_an_evaluation_that_cannot_be_done_leaves_nothing_behind(
    tmp_path: Path,
    tiny_target: Path,
    drafter: Path,
    prompts: Path,
    wrong: dict[str, Any],
    said: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(serving_charts, "check_pictures", list)  # where matplotlib is not
    monkeypatch.setattr("eagle3.evaluation.run.check_sglang", lambda server: [])
    right = {"drafter": drafter, "target.path": tiny_target, "target.device": "cpu"}
    with pytest.raises(UserError, match=said):
        evaluate(settings(tmp_path / "out", prompts, **(right | wrong)))
    assert list(tmp_path.iterdir()) == []


def test_a_store_that_is_all_trained_on_is_refused_before_the_prompts_are_decoded(
    tmp_path: Path,
    tiny_target: Path,
    drafter: Path,
    prompts: Path,
    make_sample: Callable[..., FeatureSample],
) -> None:
    names = [name for name in (f"s{number}" for number in range(8)) if not is_held_out(name, 0.5)]
    write_target_store(tmp_path / "store", tiny_target, [make_sample(name, [0, 0, 1, 1]) for name in names])
    named = {"drafter": drafter, "store": tmp_path / "store", "target.path": tiny_target, "held_out_share": 0.5}
    with pytest.raises(UserError, match=r"held_out_share must leave samples of the store, got none of 4 with 0\.5"):
        evaluate(settings(tmp_path / "out", prompts, **named))
    assert not (tmp_path / "out").exists()


def test_a_drafter_of_another_target_is_refused(
    tmp_path: Path, drafter: Path, prompts: Path, make_target: Callable[..., Path]
) -> None:
    other = make_target(tmp_path / "other", hidden_size=96)
    with pytest.raises(UserError, match="hidden_size=64, wanted the target's 96"):
        evaluate(settings(tmp_path / "out", prompts, drafter=drafter, **{"target.path": other}))


def test_capture_layers_that_the_drafter_does_not_read_are_refused(
    tmp_path: Path, tiny_target: Path, drafter: Path, prompts: Path
) -> None:
    layers = {"target.path": tiny_target, "target.capture_layers": "[1, 4, 5]"}
    with pytest.raises(UserError, match=r"target.capture_layers must be \[2, 4, 5\], .* got \[1, 4, 5\]"):
        evaluate(settings(tmp_path / "out", prompts, drafter=drafter, **layers))


def test_drafts_past_the_end_of_an_answer_are_not_counted() -> None:
    # Prefill 1, then rounds of 2 and 4; the last would emit 4, of which 2 are left.
    rounds = decoded_rounds("a", Answer(token_ids=[0] * 5, accepted=[1, 3]), num_draft_tokens=3)
    assert (rounds.num_tokens, rounds.rounds) == (5, 2)
    assert (rounds.reached, rounds.accepted) == ((2, 2, 0), (2, 1, 0))


def test_the_command_ends_with_one_sentence_on_a_users_mistake(tmp_path: Path, prompts: Path) -> None:
    done = subprocess.run(
        [
            sys.executable,
            "evaluate.py",
            "--server",
            "http://127.0.0.1:9",
            f"prompts.path={prompts}",
            f"out={tmp_path / 'out'}",
        ],
        cwd=ROOT,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 2, done.stderr
    assert done.stderr.splitlines()[-1].startswith("error: --server must be the URL of a running server, got no answer")
    assert "Traceback" not in done.stderr
    assert not (tmp_path / "out").exists()
