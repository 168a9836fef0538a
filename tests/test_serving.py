"""Servers with the drafter and without: every cell is measured, compared with the plain one, and put in words."""

import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from json_servers import Reply
from target_stores import LAYERS
from test_launch import fake_python
from test_served import INFO
from test_served import running_server as fake_server
from tiny_drafters import random_drafter
from transformers import AutoModelForCausalLM

from eagle3.capture.server import Server
from eagle3.commands.compare import main
from eagle3.config import EvaluateConfig, ServeConfig, ServerConfig, UserError
from eagle3.config_file import load_config
from eagle3.draft.acceptance import summarise
from eagle3.draft.export import export_drafter
from eagle3.draft.questions import read_questions
from eagle3.draft.target_weights import load_target_config
from eagle3.evaluation import serving
from eagle3.evaluation.cells import Asking, Cell, ServingReport, context_bucket
from eagle3.evaluation.run import evaluate
from eagle3.evaluation.served import ServedAnswer, ServerFacts, SGLangClient
from eagle3.evaluation.serving import check_serve, check_sglang, compare_answers, rule_of
from eagle3.evaluation.serving_charts import NAMES, check_pictures
from eagle3.evaluation.serving_report import break_even
from eagle3.evaluation.simulate import Speculation
from eagle3.evaluation.target import LocalTarget


@pytest.fixture(scope="module")
def drafter(tiny_target: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    model = AutoModelForCausalLM.from_pretrained(tiny_target, dtype=torch.float32)
    directory = tmp_path_factory.mktemp("drafter") / "drafter"
    config = load_target_config(tiny_target)
    export_drafter(
        random_drafter(LocalTarget(model, LAYERS, frozenset()), 200), directory, target_config=config, card=""
    )
    return directory


def test_every_server_is_measured_and_compared(
    tmp_path: Path,
    tiny_target: Path,
    drafter: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Servers that answer with 10 tokens; with the drafter in 5 rounds, and once with another last token."""
    pytest.importorskip("matplotlib", reason="the pictures need it")
    started: list[Mapping[str, Any]] = []
    caches: set[str | None] = set()

    @contextmanager
    def running_server(config: ServerConfig, model_path: str, flags: Mapping[str, Any], env: Any) -> Iterator[Server]:
        assert model_path == str(tiny_target)
        started.append(flags)

        def generate(body: dict[str, Any]) -> Reply:
            caches.add(body.get("extra_key"))
            last = 9 if len(body["input_ids"]) % 2 or not flags else 8
            meta: dict[str, Any] = {"completion_tokens": 10}
            if flags and body["sampling_params"]["max_new_tokens"] > 1:
                meta |= {"spec_verify_ct": 5, "spec_correct_drafts_histogram": [2, 2, 1]}
            if "top_logprobs_num" in body:
                meta["output_top_logprobs"] = [[[-0.70, 9, None], [-0.75, 8, None]]]
            return 200, {"output_ids": [*range(20, 29), last], "meta_info": meta}

        with fake_server(generate, (200, INFO)) as url:
            yield Server(url)

    monkeypatch.setattr(serving, "running_server", running_server)
    monkeypatch.setattr("eagle3.evaluation.run.check_sglang", lambda server: [])
    prompts = tmp_path / "prompts.jsonl"
    texts = ["a", "bb", "ccc", "dddd"]
    rows = [{"id": text, "domain": "maths", "messages": [{"role": "user", "content": text}]} for text in texts]
    prompts.write_text("".join(json.dumps(row) + "\n" for row in rows))
    named: dict[str, Any] = {
        "drafter": drafter,
        "target.path": tiny_target,
        "prompts.path": prompts,
        "out": tmp_path / "out",
    }
    named |= {"serve.speculations": ["2", "3/2/6"], "serve.concurrency": [1, 2], "serve.temperatures": [0, 1]}
    named["serve.prompts_per_slot"] = 1
    named |= {"max_new_tokens": 10, "tracking.backend": "none"}
    result = evaluate(load_config(EvaluateConfig, None, [f"{name}={value}" for name, value in named.items()]))
    tree = {"num-steps": 3, "eagle-topk": 2, "num-draft-tokens": 6}
    assert started[1] == {
        "speculative-algorithm": "EAGLE3",
        "speculative-draft-model-path": str(drafter),
        **{f"speculative-{name}": value for name, value in tree.items()},
    }
    assert started[0]["speculative-num-draft-tokens"] == 3
    assert started[2] == {}
    assert caches == {None, "warm-up", "T=0 n=1", "T=0 n=2", "T=1 n=1", "T=1 n=2"}
    keys = [(cell["server"], cell["temperature"], cell["concurrency"]) for cell in result["cells"]]
    assert keys == [(name, t, c) for name in ("2", "3/2/6", "plain") for t in (0.0, 1.0) for c in (1, 2)]
    first, plain = result["cells"][0], result["cells"][-4]
    assert first["acceptance"]["tau"] == 2.0
    assert first["acceptance"]["conditional"] == [3 / 5, 1 / 3]
    assert first["histogram"] == [8, 8, 4]
    assert list(first["by_context"]) == ["0-511"]
    assert first["by_set"] == {"maths": first["acceptance"]} == {"maths": first["by_context"]["0-511"]}
    # What the servers answered is none of this drafter's: as many rounds as tokens but one.
    assert first["simulated"]["num_tokens"] == 40
    assert first["simulated"]["rounds"] >= first["acceptance"]["rounds"]
    assert first["simulated_by_set"] == {"maths": first["simulated"]}
    assert (result["cells"][1]["num_answers"], first["num_answers"]) == (2, 4)  # prompts_per_slot
    assert result["cells"][1]["simulated"] is None
    assert first["speed_up"] == pytest.approx(first["tokens_per_second"] / plain["tokens_per_second"])
    assert (plain["acceptance"], plain["speed_up"], plain["num_tokens"]) == (None, None, 40)
    assert 0 < first["latency_median"] <= first["latency_95"]
    for agreement in result["agreements"]:
        assert agreement["num_answers"] == 4
        assert agreement["num_equal"] + agreement["num_near_ties"] == 4
        assert 0 < agreement["num_equal"] < 4
    assert json.loads((tmp_path / "out" / "result.json").read_text()) == result
    lines = [json.loads(line) for line in (tmp_path / "out" / "answers.jsonl").read_text().splitlines()]
    assert len(lines) == 3 * 2 * 4
    assert [lines[0][name] for name in ("server", "set", "sample_id", "rounds")] == ["2", "maths", "a", 5]
    assert lines[0]["token_ids"][:9] == list(range(20, 29))
    assert sum(line["simulated_rounds"] for line in lines[:4]) == first["simulated"]["rounds"]
    questions = read_questions(tmp_path / "out" / "questions.jsonl")
    assert list(questions)[:4] == ["trained", "simulated", "2, T=1", "2, T=1, simulated"]
    assert summarise([each.answer for each in questions["trained"]], seed=0).tau == first["acceptance"]["tau"]
    assert (result["tau_trained"], result["num_draft_tokens"]) == (2.0, 2)
    assert main(["--verify", str(tmp_path / "out")]) == 0
    page, markdown = ((tmp_path / "out" / f"report.{kind}").read_text() for kind in ("html", "md"))
    for name in NAMES:
        assert (tmp_path / "out" / f"{name}.png").read_bytes().startswith(b"\x89PNG")
    for text in (page, markdown, capsys.readouterr().out):
        assert "3/2/6" in text
        assert "SGLang 0.5.23; 4 prompts; all servers with the same flags." in text
    assert page.count('src="data:image/png;base64,') == len(NAMES)
    differs = first["simulated"]["tau"] / 2 - 1
    assert f"| 2 | 0 | maths | 4 | 40 | 2.000 | {first['simulated']['tau']:.3f} | {differs:+.2%} |" in markdown
    assert "| 2 | 0 | 1 | 2.000 |" in markdown


def cell(server: str, concurrency: int, seconds: float) -> Cell:
    latencies: dict[str, Any] = {"latency_mean": 1.0, "latency_median": 1.0, "latency_95": 1.0}
    return Cell(server, 0.0, concurrency, 1, 0, num_tokens=100, seconds=seconds, **latencies)


@pytest.mark.parametrize(
    ("seconds", "said"),
    [
        ([0.5, 0.8, 0.9], "faster at every concurrency that was measured (1.11x to 2.00x)."),
        (
            [0.5, 0.8, 1.25],
            "faster up to 4 requests at a time (1.25x), slower from 16 (0.80x): switch speculation off above 4.",
        ),
        ([2.0, 2.0, 1.25], "slower at every concurrency that was measured; leave speculation off."),
        ([2.0, 0.5, 0.5], "slower at 1 (0.50x) and faster beyond: repeat it."),
    ],
)
def test_break_even_is_put_in_words(seconds: list[float], said: str) -> None:
    cells = [cell("3", n, s) for n, s in zip((1, 4, 16), seconds, strict=True)]
    report = ServingReport(cells + [cell("plain", n, 1.0) for n in (1, 4, 16)], [], {}, [], [])
    assert break_even(report) == [f"Speculation 3 at T=0: {said}"]
    assert report.speed_up(report.cells[0]) == 1 / seconds[0]
    assert break_even(replace(report, cells=cells)) == []


def test_near_ties_are_told_from_other_answers(monkeypatch: pytest.MonkeyPatch) -> None:
    def answer(*token_ids: int) -> ServedAnswer:
        return ServedAnswer(list(token_ids), len(token_ids), 1, [])

    asked: list[list[int]] = []

    def generate(body: dict[str, Any]) -> Reply:
        asked.append(body["input_ids"])
        margin = 0.05 if body["input_ids"][0] == 1 else 2.0
        return 200, {"output_ids": [6], "meta_info": {"output_top_logprobs": [[[-0.5, 6, ""], [-0.5 - margin, 7, ""]]]}}

    with fake_server(generate) as url:
        client = SGLangClient(url, 8, is_speculative=False)
        ours = [answer(5, 7, 8), answer(5, 7, 8), answer(5, 6), answer(5, 9), answer(5)]
        theirs = [answer(5, 6, 8), answer(5, 6, 8), answer(5, 6), answer(5, 6), answer(5, 6)]
        prompts = [[1, 2], [3, 4], [1, 2], [1, 3], [1, 4]]
        agreement = compare_answers("3", ours, theirs, prompts, client)
    assert (agreement.num_answers, agreement.num_equal, agreement.num_near_ties) == (5, 1, 1)
    assert asked == [[1, 2, 5], [3, 4, 5], [1, 3, 5], [1, 4, 5]]
    with (
        fake_server(lambda body: (200, {"meta_info": {}})) as url,
        pytest.raises(UserError, match="must return output_top_logprobs, got KeyError"),
    ):
        SGLangClient(url, 8).top_two([1])


def test_prompts_are_sorted_by_length() -> None:
    lengths = {0: "0-511", 511: "0-511", 512: "512-2047", 8191: "2048-8191", 40000: "32768+"}
    assert {length: context_bucket(length) for length in lengths} == lengths


def test_settings_that_cannot_be_served_are_named() -> None:
    server = ServerConfig(urls=["http://a"])
    problems = check_serve(ServeConfig(server, ["3", "3", "x", "3@1"], [0, 0], [-1.0], prompts_per_slot=0))
    assert [problem.split(" must")[0] for problem in problems] == [
        "serve.speculations: a speculation",
        "serve.speculations",
        "serve.speculations",
        "serve.concurrency",
        "serve.concurrency",
        "serve.temperatures",
        "serve.prompts_per_slot",
        "serve.server.urls",
    ]
    config = EvaluateConfig(serve=ServeConfig(), server="http://a")
    with pytest.raises(UserError, match="serve must be null with server, store or explain, got both"):
        evaluate(config)


def test_sglang_is_asked_for_before_servers_are_started(tmp_path: Path) -> None:
    python = fake_python(tmp_path, "echo 'PackageNotFoundError: No package metadata' >&2; exit 1")
    config = EvaluateConfig(serve=ServeConfig(ServerConfig(python=python)), out=str(tmp_path / "out"))
    with pytest.raises(UserError, match=r"serve\.server\.python must have sglang installed, got '.*python' \(Package"):
        evaluate(config)
    assert not (tmp_path / "out").exists()
    (problem,) = check_sglang(ServerConfig(python="/none/python"))
    assert problem.startswith("serve.server.python must be an interpreter, got '/none/python' (")
    advice = "; name a serving environment in serve.server.python, or measure a running server with --server URL"
    assert problem.endswith(advice)
    usable = fake_python(tmp_path, """echo '["0.5.23", []]'""")  # it serves without our plugin
    assert check_sglang(ServerConfig(python=usable)) == []


def test_pictures_are_asked_for_before_servers_are_started() -> None:
    with mock.patch("importlib.util.find_spec", return_value=None):
        assert check_pictures() == [
            "the report must have matplotlib for its pictures, got none installed; pip install matplotlib"
        ]


def test_fewer_prompts_are_taken_evenly_over_all() -> None:
    asking = Asking([str(i) for i in range(10)], [[i] for i in range(10)], ["even", "odd"] * 5)
    thinned = asking.thinned(4)
    assert thinned.prompts == [[0], [2], [5], [7]]
    assert (thinned.sample_ids, thinned.sets) == (["0", "2", "5", "7"], ["even", "even", "odd", "odd"])
    assert asking.thinned(10) is asking


def test_a_server_that_rejects_is_simulated_so() -> None:
    rejecting = ServerFacts("", "", "", {"speculative_use_rejection_sampling": True})
    chain = Speculation(3)
    assert rule_of(chain, 1.0, ServerFacts("", "", "", {})) == chain
    assert rule_of(chain, 0.0, rejecting) == chain
    assert rule_of(chain, 0.7, rejecting) == Speculation(3, temperature=0.7)
