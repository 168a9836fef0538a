"""One experiment of real runs on a tiny target, compared from its directories and from what W&B's client wrote."""

import dataclasses
import json
import re
import shutil
import time
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import wandb
from tiny_training import tiny_config

from eagle3.board import Board, Identity
from eagle3.capture.extraction import run_extraction
from eagle3.config import (
    EvaluateConfig,
    ExtractConfig,
    PromptsConfig,
    RegenerateConfig,
    SpeculationConfig,
    StoreConfig,
    TargetConfig,
    TrackingConfig,
    UserError,
    by_dotted_name,
)
from eagle3.draft.questions import COLUMNS
from eagle3.evaluation import compare
from eagle3.evaluation.comparison import ASSUMED_SPREAD, seed_spread
from eagle3.evaluation.comparison import compare as compare_contenders
from eagle3.evaluation.page import draw
from eagle3.evaluation.run import evaluate
from eagle3.evaluation.runs import Contender, Run, line_up, read_directory
from eagle3.evaluation.wandb_runs import read_remote, read_wandb_files, wandb_files
from eagle3.training.trainer import train

SHARE = 0.4  # held out
STEPS = {"long": 12, "short": 6}


@pytest.fixture(scope="module")
def base(tiny_target: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with features/, two trainings on them, and their evaluations; W&B as without a login."""
    base = tmp_path_factory.mktemp("experiment")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("WANDB_MODE", "offline")
        target = TargetConfig(str(tiny_target), dtype="float32", device="cpu")
        prompts = base / "prompts.jsonl"
        rows = [{"id": f"p{i}", "messages": [{"role": "user", "content": f"Name {i} of ten."}]} for i in range(20)]
        prompts.write_text("".join(json.dumps(row) + "\n" for row in rows))
        run_extraction(
            ExtractConfig(
                target=target,
                store=StoreConfig(str(base / "features")),
                engine="transformers",
                prompts=PromptsConfig(str(prompts)),
                regenerate=RegenerateConfig(max_new_tokens=12, cut_loops=False),
            )
        )
        config = tiny_config(base / "features", tiny_target, base)
        config = dataclasses.replace(
            config,
            target=target,
            data=dataclasses.replace(config.data, held_out_share=SHARE),
            tracking=TrackingConfig(),
        )
        for name, num_steps in STEPS.items():
            run = dataclasses.replace(config.run, dir=str(base / name / "train"), max_steps=num_steps, validate_every=6)
            run_dir = train(dataclasses.replace(config, run=run))
            evaluate(
                EvaluateConfig(
                    drafter=str(run_dir / "drafter"),
                    target=target,
                    prompts=PromptsConfig(str(prompts)),
                    held_out_share=SHARE,
                    max_new_tokens=12,
                    timed_prompts=0,
                    speculation=SpeculationConfig(num_draft_tokens=3),
                    out=str(base / name / "evaluation"),
                )
            )
    return base


def run_of(base: Path, name: str, kind: str) -> Run:
    return next(
        run
        for run in read_directory(base / name / kind)
        if run.identity.job_type == ("train" if kind == "train" else "evaluate")
    )


def printed(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    assert compare.main(arguments) == 0
    return capsys.readouterr().out


@pytest.fixture(autouse=True)
def wide(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "200")


def test_the_runs_of_an_experiment_are_linked(base: Path) -> None:
    groups = set()
    for directory in (base / "features", *(base / name / kind for name in STEPS for kind in ("train", "evaluation"))):
        (files,) = [wandb_files(directory / "wandb")]
        summary = json.loads((directory / "run.json").read_text())["sessions"][-1]["run"]
        groups.add(summary["group"])
        assert files[0].parent.name.endswith(summary["id"])
    assert len(groups) == 1
    trained = run_of(base, "long", "train").identity
    assert run_of(base, "long", "evaluation").identity.inputs == [trained.id]
    store = json.loads((base / "features" / "run.json").read_text())["sessions"][-1]
    assert trained.inputs == [store["run"]["id"]]
    assert set(store["digests"]) == {"prompts", "target"}


def test_directories_and_wandb_files_say_the_same(base: Path) -> None:
    for name in STEPS:
        for kind in ("train", "evaluation"):
            local = run_of(base, name, kind)
            (remote,) = read_wandb_files(wandb_files(base / name / kind / "wandb"))
            assert remote.identity == local.identity
            assert by_dotted_name(remote.config) == by_dotted_name(local.config)  # W&B keeps no empty mapping
            assert remote.questions == local.questions
            assert by_dotted_name(remote.provenance) == by_dotted_name(local.provenance)
            for metric in ("loss", "held_out/tau", "held_out/loss", "top1/0", "device_seconds", "tau_trained"):
                assert remote.curve(metric) == local.curve(metric), (name, kind, metric)
            assert remote.num_draft_tokens == local.num_draft_tokens == 3


def test_the_command_shows_the_same_from_both(base: Path, capsys: pytest.CaptureFixture[str]) -> None:
    local = printed(capsys, str(base / "long"), str(base / "short"))
    both = ("train", "evaluation")
    mixed = printed(capsys, str(base / "long"), *(str(base / "short" / kind / "wandb") for kind in both))
    assert mixed == local
    assert re.search(r"run\.max_steps +\W+ 12 +\W+ 6 ", local)
    assert "learning_rate" not in local  # the same in both
    assert "decoded or served, 3 drafts a round" in local
    assert "held-out samples, in training, 3 drafts a round" in local
    trained = run_of(base, "long", "train")
    best = max(tau for step, tau in trained.curve("held_out/tau").items() if step)
    assert f"{best:.3f} (" in local
    assert f"{trained.provenance['store']['num_bytes']:,}" in local
    assert "1.6% of tau" in local


def test_an_evaluation_brings_its_training(base: Path) -> None:
    (contender,) = line_up(read_directory(base / "long" / "evaluation"))
    assert (contender.training, contender.evaluation) == (
        run_of(base, "long", "train"),
        run_of(base, "long", "evaluation"),
    )


def test_the_page_holds_picture_and_tables(base: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("matplotlib", reason="the picture needs it")
    shown = printed(capsys, str(base / "long"), str(base / "short"), "--out", str(tmp_path / "page"))
    assert str(tmp_path / "page" / "comparison.html") in shown
    page = (tmp_path / "page" / "comparison.html").read_text()
    assert not re.search(r"(src|href)=\"(?!data:)", page)  # everything is inside
    assert "<script" not in page
    picture = (tmp_path / "page" / "comparison.png").read_bytes()
    assert picture.startswith(b"\x89PNG")
    for text in ("run.max_steps", "decoded or served", "tokens trained on", "data:image/png;base64,"):
        assert text in page
    figures = json.loads((tmp_path / "page" / "comparison.json").read_text())
    assert figures["command"].startswith(f"eagle3 compare {base / 'long'}")
    assert figures["acceptance"]["trained"][0]["tau"] == run_of(base, "long", "evaluation").lines[-1]["tau_trained"]
    assert [each["measure"] for each in figures["verdicts"]] == ["trained", "held_out"]
    assert [[run["name"] for run in runs] for runs in figures["runs"]] == [["train", "evaluation"]] * 2


def test_a_name_is_drawn_as_it_is(base: Path) -> None:
    pytest.importorskip("matplotlib", reason="the picture needs it")
    contenders = line_up([*read_directory(base / "long"), *read_directory(base / "short")])
    contenders[0] = dataclasses.replace(contenders[0], name=r"a$\nothing_{b$")
    assert draw(compare_contenders(contenders)).startswith(b"\x89PNG")


def test_without_matplotlib_the_extra_is_named(base: Path, tmp_path: Path) -> None:
    with (
        mock.patch.dict("sys.modules", {"matplotlib.figure": None}),
        pytest.raises(UserError, match=r"must have matplotlib for its picture, got none .*eagle3\[compare\]"),
    ):
        compare.main([str(base / "long"), str(base / "short"), "--out", str(tmp_path)])


def test_every_headline_can_be_derived_again(base: Path, capsys: pytest.CaptureFixture[str]) -> None:
    shown = printed(capsys, "--verify", str(base / "long"), str(base / "short" / "train" / "wandb"))
    assert "NOT" not in shown
    assert "All figures hold." in shown
    tau = run_of(base, "long", "evaluation").lines[-1]["tau_trained"]
    assert f"ok  tau trained: reported {tau}" in shown
    for what in ("held-out tau, low", "trained, rounds", "digest of", "simulated: answers whose counters contradict"):
        assert what in shown, what


def tampered(base: Path, tmp_path: Path) -> Path:
    shutil.copytree(base / "long", tmp_path / "long", ignore=shutil.ignore_patterns("wandb", "step-*"))
    return tmp_path / "long"


def test_a_figure_that_does_not_follow_from_its_counters_is_found(
    base: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = tampered(base, tmp_path)
    result = json.loads((run / "evaluation" / "result.json").read_text())
    result["tau_trained"] += 0.01
    (run / "evaluation" / "result.json").write_text(json.dumps(result))
    lines = [json.loads(line) for line in (run / "train" / "questions.jsonl").read_text().splitlines()]
    lines[0]["rounds"] = 1.0  # more tokens than a round can have emitted
    (run / "train" / "questions.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert compare.main(["--verify", str(run)]) == 1
    shown = capsys.readouterr().out
    assert "NOT tau trained: reported" in shown
    assert "NOT held-out tau: reported" in shown
    assert (
        f'NOT held_out: answers whose counters contradict each other: reported [], derived ["{lines[0]["sample_id"]}"]'
        in shown
    )


def test_counters_by_position_and_loops_are_derived_again_too(
    base: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = tampered(base, tmp_path)
    result = json.loads((run / "evaluation" / "result.json").read_text())
    result["trained"]["without_loops"]["tau"] += 0.01
    result["simulated"]["all_answers"]["tau"] += 0.01
    del result["tau_simulated"]
    (run / "evaluation" / "result.json").write_text(json.dumps(result))
    lines = [json.loads(line) for line in (run / "train" / "questions.jsonl").read_text().splitlines()]
    lines[0]["accepted"][0] = lines[0]["reached"][0] + 1.0
    (run / "train" / "questions.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert compare.main(["--verify", str(run)]) == 1
    shown = capsys.readouterr().out
    for what in (
        "trained without loops, tau: reported",
        "simulated, tau: reported",
        "tau simulated: reported null",
        "held-out acceptance at position 0: reported",
        "held_out: answers whose counters contradict each other: reported",
    ):
        assert f"NOT {what}" in shown, what
    assert shown.count("NOT ") == 5


def test_a_run_without_counters_does_not_hold(base: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = tampered(base, tmp_path)
    (run / "train" / "questions.jsonl").unlink()
    (run / "evaluation" / "questions.jsonl").unlink()
    assert compare.main(["--verify", str(run)]) == 1
    shown = capsys.readouterr().out
    assert "NOT a validation and its questions.jsonl" in shown
    assert "NOT result.json and questions.jsonl" in shown
    assert compare.main([str(run), str(base / "short")]) == 0
    assert "cannot be tested against train" in capsys.readouterr().out


def test_the_files_of_a_resumed_run_are_one_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("WANDB_MODE", "offline")
    identity = Identity("abcd1234", "a", "g", "train")
    some = {"some": "thing"}  # W&B keeps no empty mapping
    said = {"git": some, "versions": some, "hardware": some, "store": some, "device": "cpu", "num_parameters": 1}
    provenance = {"run": dataclasses.asdict(identity), "num_draft_tokens": 3, **said}
    settings = {"data": {"seed": 0}, "provenance": provenance}
    for steps, loss in ((range(1, 5), 4.0), (range(3, 7), 2.0)):  # killed after step 4, its last checkpoint was step 2
        with Board(tmp_path, TrackingConfig(), identity, settings) as board:
            for step in steps:
                board.log(step, {"loss": loss})
            board.table("questions", COLUMNS, [["held_out", "q", "p", None, 5, loss, [loss], [0.0]]])
        time.sleep(1.1)  # W&B names directories by the second
    killed = tmp_path / "wandb" / "offline-run-20991231_000000-abcd1234" / "run-abcd1234.wandb"  # at its very start
    killed.parent.mkdir()
    killed.write_bytes(bytes.fromhex("3a572642e1be00"))  # as such a kill left it
    (run,) = compare.read(str(tmp_path / "wandb"))
    assert f"{killed} is left out: its process was killed before" in caplog.text
    assert run.identity == identity
    assert run.curve("loss") == {1: 4.0, 2: 4.0, 3: 2.0, 4: 2.0, 5: 2.0, 6: 2.0}
    assert [each.answer.rounds for each in run.questions["held_out"]] == [2.0]
    for path in (tmp_path / "wandb").rglob("questions*.table.json"):
        path.write_text("{")
    with pytest.raises(UserError, match=r"the table of questions must be JSON beside its \.wandb file, got none or"):
        compare.read(str(tmp_path / "wandb"))


def remote_run(run: Run, directory: Path) -> mock.Mock:
    """Stands in for W&B's servers, which tests cannot reach: what its API returns of a run that was synced."""
    (file,) = wandb_files(Path(run.source) / "wandb")
    table = next(file.parent.glob("files/media/table/questions_*.json"))
    remote = mock.create_autospec(wandb.apis.public.Run, instance=True)
    provenance = run.provenance | {"run": dataclasses.asdict(run.identity)}
    remote.config = run.config | {"provenance": provenance}
    remote.path, remote.job_type = ["me", "eagle3", run.identity.id], run.identity.job_type
    remote.summary = {"questions": {"_type": "table-file", "path": f"media/table/{table.name}"}}
    remote.scan_history.return_value = [
        {"_step": line["step"], **{name: value for name, value in line.items() if name != "step"}} for line in run.lines
    ]
    remote.file.return_value.download.side_effect = lambda root, replace: table.open()
    return remote


def test_runs_come_from_wandbs_api_by_name_and_by_filter(base: Path, tmp_path: Path) -> None:
    local = [run_of(base, "long", kind) for kind in ("train", "evaluation")]
    remotes = [remote_run(run, tmp_path) for run in local]
    api = mock.create_autospec(wandb.Api, instance=True)
    api.run.return_value, api.runs.return_value = remotes[0], remotes
    (run,) = read_remote(f"me/eagle3/{local[0].identity.id}", api)
    api.run.assert_called_once_with(f"me/eagle3/{local[0].identity.id}")
    assert dataclasses.replace(run, source=local[0].source) == local[0]
    both = read_remote("me/eagle3?group=g&tag=t&job_type=train", api)
    assert [each.questions for each in both] == [each.questions for each in local]
    assert api.runs.call_args.kwargs["filters"] == {"group": "g", "tags": "t", "jobType": "train"}


def test_what_wandb_does_not_have_is_the_users_mistake() -> None:
    api = mock.create_autospec(wandb.Api, instance=True)
    api.run.side_effect = wandb.errors.CommError("not found")
    with pytest.raises(UserError, match=r"a run in W&B must be one that this login can read, got 'a/b/c' .*not found"):
        read_remote("a/b/c", api)
    api.runs.return_value = []
    with pytest.raises(UserError, match=r"a filter must leave a training or an evaluation, got none of 0 runs"):
        read_remote("a/b?group=g", api)
    with pytest.raises(UserError, match=r"a filter of runs must be NAME=VALUE with & between, .* got 'colour=red'"):
        read_remote("a/b?colour=red", api)
    foreign = mock.create_autospec(wandb.apis.public.Run, instance=True)
    foreign.config, foreign.summary, foreign.path, foreign.job_type = {"lr": 1}, {}, ["a", "b", "c"], None
    foreign.scan_history.return_value = []
    api = mock.create_autospec(wandb.Api, instance=True)
    api.run.return_value = foreign
    with pytest.raises(UserError, match=r"a run in W&B must have been written by this package, got one without prov"):
        read_remote("a/b/c", api)


def test_a_file_that_wandb_cannot_read_is_named(tmp_path: Path) -> None:
    (tmp_path / "x.wandb").write_bytes(b"no log at all")
    with pytest.raises(UserError, match=r"a \.wandb file must be one that `wandb leet inspect` reads, got .*x\.wandb"):
        compare.read(str(tmp_path / "x.wandb"))


def test_wandb_files_without_a_run_are_an_error(base: Path) -> None:
    with pytest.raises(UserError, match=r"W&B's files must hold a training or an evaluation, got none in .*features"):
        compare.read(str(base / "features" / "wandb"))


@pytest.mark.parametrize("line", ["[]", "null", "{}", '{"step": "a"}', '{"step": 1, "loss": null}', '{"step"'])
def test_a_damaged_metric_line_is_named(base: Path, tmp_path: Path, line: str) -> None:
    run = tampered(base, tmp_path) / "train"
    path = run / "metrics.jsonl"
    path.write_text(line + "\n" + path.read_text())
    with pytest.raises(UserError, match=r"every line of metrics\.jsonl must be a JSON object with a step .* line 1\)"):
        compare.read(str(run))


def test_a_line_that_a_kill_cut_short_is_left_out(base: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    run = tampered(base, tmp_path) / "train"
    lines = run_of(base, "long", "train").lines
    with (run / "metrics.jsonl").open("a") as file:
        file.write('{"step": 99, "lo')
    assert compare.read(str(run))[0].lines == lines
    assert "the last line of" in caplog.text


@pytest.mark.parametrize("text", ["", "{", "[]", "null"])
def test_a_damaged_result_is_named(base: Path, tmp_path: Path, text: str) -> None:
    run = tampered(base, tmp_path) / "evaluation"
    (run / "result.json").write_text(text)
    with pytest.raises(UserError, match=r"result\.json must be the JSON object that an evaluation wrote, got"):
        compare.read(str(run))


def test_a_run_that_does_not_say_what_is_needed_is_refused(base: Path, tmp_path: Path) -> None:
    run = tampered(base, tmp_path) / "train"
    record = json.loads((run / "run.json").read_text())
    del record["sessions"][-1]["store"], record["sessions"][-1]["config"]
    (run / "run.json").write_text(json.dumps(record))
    with pytest.raises(UserError, match=r"a run to compare must say its git, .* another kind of config, store \("):
        compare.read(str(run))
    record["sessions"][-1]["run"]["job_type"] = "cook"
    (run / "run.json").write_text(json.dumps(record))
    with pytest.raises(UserError, match=r"a run's job type must be one of extract, train, evaluate, got 'cook'"):
        compare.read(str(run))
    with pytest.raises(UserError, match=r"a run to compare must be a training or an evaluation, got an extraction"):
        compare.main(["--verify", str(base / "features")])


def test_what_was_not_logged_costs_nothing_known(base: Path, tmp_path: Path) -> None:
    run = tampered(base, tmp_path)
    (run / "train" / "metrics.jsonl").write_text("")
    (run / "evaluation" / "result.json").unlink()
    found = compare_contenders(line_up([*read_directory(base / "short"), *read_directory(run)]))
    assert found.cost["training, device hours"][1] is None
    assert found.cost["tokens trained on"][1] is None
    assert found.cost["tokens trained on"][0] is not None
    shown = compare_contenders(line_up([run_of(base, "short", "evaluation"), run_of(tmp_path, "long", "evaluation")]))
    assert "3 drafts a round against an unknown number of" in shown.remarks[0]


def test_names_that_mean_no_run_are_refused(base: Path, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"a run to compare must be a directory, a \.wandb file, .* got 'nothing'"):
        compare.read("nothing")
    with pytest.raises(UserError, match=r"a run to compare must be a directory with a run\.json, got none in it or"):
        compare.read(str(tmp_path))
    (tmp_path / "run.json").write_text('{"sessions": []}')
    with pytest.raises(UserError, match=r"run\.json must hold a session, got none"):
        compare.read(str(tmp_path))
    with pytest.raises(UserError, match=r"a comparison must have two runs or more, got 1 \(train\)"):
        compare.main([str(base / "long")])
    with pytest.raises(UserError, match=r"--seed-spread must be from 0 to below 1, got 2\.0; 0\.01 is one percent"):
        compare.main([str(base / "long"), str(base / "short"), "--seed-spread", "2"])


def seeded(run: Run, seed: int, num_rounds_more: float) -> Contender:
    """A copy of a training with another seed, whose answers took more rounds."""
    config: dict[str, Any] = run.config | {"run": run.config["run"] | {"seed": seed}}
    questions = [
        dataclasses.replace(each, answer=dataclasses.replace(each.answer, rounds=each.answer.rounds + num_rounds_more))
        for each in run.questions["held_out"]
    ]
    changed = dataclasses.replace(run, config=config, questions={"held_out": questions})
    return Contender(str(seed), changed, None)


def test_seeds_of_one_recipe_measure_their_spread(base: Path) -> None:
    run = run_of(base, "long", "train")
    contenders = [seeded(run, 0, 0.0), seeded(run, 1, 1.0)]
    comparison = compare_contenders(contenders)
    first, second = (each.tau for each in comparison.acceptance["held_out"] if each is not None)
    mean = (first + second) / 2
    squares = (first / mean - 1) ** 2 + (second / mean - 1) ** 2
    assert comparison.spread == pytest.approx(((4 * ASSUMED_SPREAD**2 + squares) / 5) ** 0.5)
    assert seed_spread([contenders[0], contenders[0]], comparison.acceptance) > ASSUMED_SPREAD / 1.2
    assert list(comparison.differences) == ["run.seed"]


def test_chains_of_another_length_are_not_tested_against_each_other(base: Path) -> None:
    run = run_of(base, "long", "train")
    longer = dataclasses.replace(run, provenance=run.provenance | {"num_draft_tokens": 7})
    comparison = compare_contenders([Contender("a", run, None), Contender("b", longer, None)])
    assert comparison.verdicts == []
    assert comparison.remarks == [
        "b cannot be tested against a (held-out samples, in training: 3 drafts a round against 7)"
    ]
