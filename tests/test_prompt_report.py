"""`python -m eagle3 prompts` says what is there, what is dropped and why, and shows what is supervised."""

import json
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from eagle3.evaluation import prompt_report
from eagle3.prompts.conversations import Conversation
from eagle3.prompts.rendering import ChatRenderer
from eagle3.prompts.tokenizers import load_tokenizer

TORTURE = Path(__file__).resolve().parent / "torture.jsonl"


@pytest.fixture(autouse=True)
def in_a_directory_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def write(path: Path, *rows: Any) -> str:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def talk(question: str, answer: str, **more: Any) -> dict[str, Any]:
    turns = [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]
    return {"messages": turns, **more}


def test_a_good_file_is_counted_and_shown(
    tmp_path: Path, tiny_target: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = [talk(f"Question {i}?", "The answer.", category="chat" if i % 2 else "code") for i in range(40)]
    path = write(tmp_path / "rows.jsonl", *rows)
    arguments = [path, "--target", str(tiny_target), "--show", "2", "draft.draft_vocab_size=48"]
    assert prompt_report.main(arguments) == 0
    said = capsys.readouterr().out
    tokenizer = load_tokenizer(str(tiny_target), False)
    rendered = [ChatRenderer(tokenizer, {}).render(row["messages"]) for row in rows]
    num_tokens = sum(len(each.input_ids) for each in rendered)
    num_supervised = sum(sum(each.loss_mask) for each in rendered)
    assert f"{path}: 40 rows, 40 usable, 0 dropped" in said
    assert "formats: messages 40" in said
    assert f"{num_tokens:,} tokens, {num_supervised:,} of them supervised" in said
    assert "tokens or fewer        40 ####" in said
    assert "draft vocabulary, over the given answers of the training split" in said
    assert "48 of 320 tokens cover 100.00%" in said
    assert "0.0% lost to the rest" in said
    assert "chat: 100.00% of" in said
    assert said.count("The answer.<|im_end|>") == 2
    assert not (tmp_path / "ckpts").exists()


def test_what_is_supervised_is_green(tiny_target: Path) -> None:
    console = Console(record=True, width=200, force_terminal=True, color_system="standard", markup=False)
    renderer = ChatRenderer(load_tokenizer(str(tiny_target), False), {})
    row = Conversation(id="a", messages=tuple(talk("Why?", "So [b]it[/b] is.")["messages"]), line=7)
    prompt_report.show_row(console, row, renderer)
    shown = console.export_text(styles=True, clear=False)
    assert "line 7, id a" in console.export_text()
    assert "\x1b[32mSo [b]it[/b] is.<|im_end|>\x1b[0m" in shown


def test_dropped_rows_are_counted_by_kind_and_go_to_a_side_file(
    tmp_path: Path, tiny_target: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = [talk("One?", "1."), {"foo": 1}, talk("Two?", "2. " * 50), talk("One?", "1."), talk("End?", "a<|im_end|>b")]
    path = write(tmp_path / "rows.jsonl", *rows)
    assert prompt_report.main([path, "--target", str(tiny_target), "prompts.max_tokens=60"]) == 1
    said = " ".join(capsys.readouterr().out.split())
    assert "5 rows, 1 usable, 4 dropped" in said
    lines = [json.loads(line) for line in Path("ckpts/rows.jsonl.rejected.jsonl").read_text().splitlines()]
    assert [(line["line"], line["kind"]) for line in lines] == [
        (2, "malformed"), (3, "too long"), (4, "id again"), (5, "not rendered"),
    ]  # fmt: skip
    assert lines[1]["reason"].startswith("row must have at most 60 tokens, got ")
    for kind in ("malformed", "too long", "id again", "not rendered"):
        assert f"{kind} " in said
    elsewhere = tmp_path / "there" / "bad.jsonl"
    assert prompt_report.main([path, "--rejected", str(elsewhere)]) == 1
    assert len(elsewhere.read_text().splitlines()) == 2  # without a target nothing is rendered


def test_rows_that_are_split_are_counted(tmp_path: Path, tiny_target: Path, capsys: pytest.CaptureFixture[str]) -> None:
    long = {"messages": talk("One?", "1.")["messages"] * 6}
    path = write(tmp_path / "rows.jsonl", long)
    settings = ["prompts.max_tokens=100", "prompts.too_long=split"]
    assert prompt_report.main([path, "--target", str(tiny_target), *settings]) == 0
    said = " ".join(capsys.readouterr().out.split())
    assert "1 rows, 1 usable" in said
    assert "samples of at most 100 tokens, 1 rows shortened (prompts.too_long=split)" in said
    assert "1 samples" not in said


def test_without_a_target_lengths_are_in_characters(capsys: pytest.CaptureFixture[str]) -> None:
    assert prompt_report.main([str(TORTURE), "--show", "1", "prompts.max_row_bytes=16384"]) == 1
    said = capsys.readouterr().out
    assert "106 rows, 63 usable, 43 dropped" in said
    assert "characters or fewer" in said
    assert "user: Why?\nassistant: Because." in said


def test_a_long_row_is_shown_by_its_ends() -> None:
    console = Console(record=True, width=200, markup=False)
    row = Conversation(id="a", messages=tuple(talk("Why " + "x" * 5000, "Because.")["messages"]), line=1)
    prompt_report.show_row(console, row, None)
    shown = console.export_text()
    assert "[...]" in shown
    assert "Because." in shown
    assert len(shown) < 2000
