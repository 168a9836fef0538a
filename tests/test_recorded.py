"""Answers that a server gave are simulated without it: the rounds are those that a real decoder takes."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from target_stores import LAYERS
from tiny_drafters import write_fitted_drafter
from transformers import AutoModelForCausalLM

from eagle3.commands.simulate import main
from eagle3.config import UserError
from eagle3.draft.export import load_drafter
from eagle3.draft.target_weights import load_target_config
from eagle3.evaluation.decoder import decode
from eagle3.evaluation.target import LocalTarget


@pytest.fixture(scope="module")
def drafter(tiny_target: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A drafter; beside it lies what it decodes, as if a server of chains of 3 had, and a plain one's answer."""
    directory = tmp_path_factory.mktemp("recorded")
    target = LocalTarget(AutoModelForCausalLM.from_pretrained(tiny_target, dtype=torch.float32), LAYERS, frozenset())
    fitted = write_fitted_drafter(directory, tiny_target, target)
    drafter = load_drafter(fitted.drafter, load_target_config(tiny_target)).eval()
    prompts = fitted.prompts[:4]
    answers = decode(target, drafter, prompts, num_draft_tokens=3, max_new_tokens=30, batch_size=4)
    lines: list[dict[str, Any]] = []
    for index, (prompt, answer) in enumerate(zip(prompts, answers, strict=True)):
        line = {"server": "3", "temperature": 0.0, "sample_id": f"q{index}", "set": ["maths", "code"][index % 2]}
        counted = {"rounds": answer.rounds, "simulated_rounds": None}
        lines.append(line | {"prompt_ids": prompt, "token_ids": answer.token_ids} | counted)
    lines.append(lines[0] | {"server": "plain", "rounds": 0})
    (directory / "answers.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return fitted.drafter


def arguments(drafter: Path, target: Path, answers: Path | None = None) -> list[str]:
    path = answers or drafter.parent / "answers.jsonl"
    return [str(path), "--target", str(target), "--drafter", str(drafter), "--dtype", "float32"]


def test_what_a_server_counted_stands_beside_what_is_simulated(
    tmp_path: Path, tiny_target: Path, drafter: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([*arguments(drafter, tiny_target), "--out", str(tmp_path / "o.json")]) == 0
    rows = json.loads((tmp_path / "o.json").read_text())["rows"]
    assert [(row["server"], row["speculation"], row["set"]) for row in rows] == [
        ("3", "3", name) for name in ("all", "maths", "code")
    ]
    for row in rows:
        for name in ("rounds", "num_tokens", "num_answers", "tau"):
            assert row["simulated"][name] == row["served"][name], (row["set"], name)
    assert rows[0]["simulated"]["rounds"] < rows[0]["simulated"]["num_tokens"] - 4  # some drafts were right
    assert "+0.00%" in capsys.readouterr().out


def test_another_way_of_serving_is_simulated_alone(tmp_path: Path, tiny_target: Path, drafter: Path) -> None:
    ways = ["--speculation", "5", "--out", str(tmp_path / "o.json")]
    main([*arguments(drafter, tiny_target), *ways])
    rows = json.loads((tmp_path / "o.json").read_text())["rows"]
    assert [(row["server"], row["set"]) for row in rows] == [
        ("3", "all"), ("3", "maths"), ("3", "code"), ("plain", "all"), ("plain", "maths"),
    ]  # fmt: skip
    assert all(row["served"] is None for row in rows)


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"rounds": "5"}, "every line of answers must be a JSON object with server, temperature, .* line 1"),
        ({"token_ids": [1, "x"]}, "every line of answers must be a JSON object .* line 1"),
        ({"prompt_ids": []}, "every line of answers must be a JSON object .* line 1"),
        ({"server": "plain"}, "--speculation must be given for answers of a plain server, got none"),
        ({"server": "x"}, "a speculation must be STEPS, .* got 'x'"),
    ],
)
def test_other_lines_are_refused(
    tmp_path: Path, tiny_target: Path, drafter: Path, changed: dict[str, Any], said: str
) -> None:
    line = json.loads((drafter.parent / "answers.jsonl").read_text().splitlines()[0])
    (tmp_path / "a.jsonl").write_text(json.dumps(line | changed) + "\n")
    with pytest.raises(UserError, match=said):
        main(arguments(drafter, tiny_target, tmp_path / "a.jsonl"))


def test_files_without_answers_and_settings_of_stores_are_refused(
    tmp_path: Path, tiny_target: Path, drafter: Path
) -> None:
    (tmp_path / "a.jsonl").write_text("")
    with pytest.raises(UserError, match="a file of answers must have a line, got none"):
        main(arguments(drafter, tiny_target, tmp_path / "a.jsonl"))
    (tmp_path / "a.jsonl").write_text("not JSON\n")
    with pytest.raises(UserError, match=r"every line of answers .* got b'not JSON' \(.*line 1\)"):
        main(arguments(drafter, tiny_target, tmp_path / "a.jsonl"))
    with pytest.raises(UserError, match="--held-out-share and --prompts must be left out with a file of answers"):
        main([*arguments(drafter, tiny_target), "--held-out-share", "0.5"])
