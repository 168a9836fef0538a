"""`python -m eagle3 prompts` says what is there, what is dropped and why, and shows what is supervised."""

import json
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from eagle3.capture.selection import select_rows
from eagle3.commands.prompts import main
from eagle3.config import InspectConfig, PromptsConfig, RegenerateConfig, TargetConfig, UserError
from eagle3.evaluation.prompt_report import TokenCounts, look_through
from eagle3.evaluation.shown_rows import show_row, shown_row
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
    assert main(arguments) == 0
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
    show_row(console, shown_row(row, renderer))
    shown = console.export_text(styles=True, clear=False)
    assert "line 7, id a" in console.export_text()
    assert "\x1b[32mSo [b]it[/b] is.<|im_end|>\x1b[0m" in shown


def test_dropped_rows_are_counted_by_kind_and_go_to_a_side_file(
    tmp_path: Path, tiny_target: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = [talk("One?", "1."), {"foo": 1}, talk("Two?", "2. " * 50), talk("One?", "1."), talk("End?", "a<|im_end|>b")]
    path = write(tmp_path / "rows.jsonl", *rows)
    assert main([path, "--target", str(tiny_target), "prompts.max_tokens=60"]) == 1
    said = " ".join(capsys.readouterr().out.split())
    assert "5 rows, 1 usable, 4 dropped" in said
    lines = [json.loads(line) for line in Path("ckpts/rows.jsonl.rejected.jsonl").read_text().splitlines()]
    assert [(line["line"], line["kind"]) for line in lines] == [
        (2, "malformed"), (3, "too long"), (4, "id again"), (5, "not rendered"),
    ]  # fmt: skip
    assert lines[1]["reason"].startswith("row must have at most 60 tokens, got ")
    for kind in ("malformed", "too long", "id again", "not rendered"):
        assert f" {kind}: 1 row line " in said
    elsewhere = tmp_path / "there" / "bad.jsonl"
    assert main([path, "--rejected", str(elsewhere)]) == 1
    assert len(elsewhere.read_text().splitlines()) == 2  # without a target nothing is rendered


def test_rows_that_are_split_are_counted(tmp_path: Path, tiny_target: Path, capsys: pytest.CaptureFixture[str]) -> None:
    long = {"messages": talk("One?", "1.")["messages"] * 6}
    path = write(tmp_path / "rows.jsonl", long)
    settings = ["prompts.max_tokens=100", "prompts.too_long=split"]
    assert main([path, "--target", str(tiny_target), *settings]) == 0
    said = " ".join(capsys.readouterr().out.split())
    assert "1 row, 1 usable" in said
    assert "samples of at most 100 tokens; 1 row shortened (prompts.too_long=split), which leaves out 0 sup" in said
    assert " 1 samples" not in said
    long["messages"][2] = {"role": "user", "content": "One? " * 30}  # an exchange that fits no sample
    assert main([write(tmp_path / "rows.jsonl", long), "--target", str(tiny_target), *settings]) == 0
    answer = len(load_tokenizer(str(tiny_target), False)("1.<|im_end|>", add_special_tokens=False)["input_ids"])
    said = " ".join(capsys.readouterr().out.split())
    assert f"1 row shortened (prompts.too_long=split), which leaves out {answer} supervised tokens" in said


def test_without_a_target_lengths_are_in_characters(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([str(TORTURE), "--show", "1", "prompts.max_row_bytes=16384"]) == 1
    said = capsys.readouterr().out
    assert "113 rows, 65 usable, 48 dropped" in said
    assert "characters or fewer" in said
    assert "user: Why?\nassistant: Because." in said


def test_a_long_row_is_shown_by_its_ends() -> None:
    console = Console(record=True, width=200, markup=False)
    row = Conversation(id="a", messages=tuple(talk("Why " + "x" * 5000, "Because.")["messages"]), line=1)
    show_row(console, shown_row(row, None))
    shown = console.export_text()
    assert "[...]" in shown
    assert "Because." in shown
    assert len(shown) < 2000


def test_what_extraction_will_take_is_said_for_answers_to_come_and_for_given_ones(
    tmp_path: Path, tiny_target: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    called = {"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": "{}"}}]}
    rows = [
        talk("One?", "1."),
        {"text": "Raw."},
        {"turns": ["First?", "Second?"]},
        talk("End?", "a<|im_end|>b"),  # its answer cannot be rendered; another one can be written
        {"messages": [*talk("Two?", "2.")["messages"][:1], called]},
        {"prompt": "Three? " * 100},
    ]
    path = write(tmp_path / "rows.jsonl", *rows)
    arguments = [path, "--target", str(tiny_target), "prompts.max_tokens=100", "--show", "9"]
    assert main(arguments) == 1
    said = capsys.readouterr().out
    assert "6 rows, 3 usable, 3 dropped" in said
    config = PromptsConfig(path, max_tokens=100)
    renderer = ChatRenderer(load_tokenizer(str(tiny_target), False), {})
    asked = select_rows(config, renderer, RegenerateConfig(), max_tokens=100)
    given = select_rows(config, renderer, RegenerateConfig(enabled=False), max_tokens=100)
    assert [row.conversation.line for row in asked.rows] == [1, 3, 4]
    assert [row.conversation.line for row in given.rows] == [1, 2]
    assert "(regenerate.enabled, the default): 3 rows, and 3 not; the first is line 2: row must be a conv" in said
    assert "(regenerate.enabled=false): 2 samples of at most 100 tokens\n" in said
    assert "line 6: prompt must have fewer than 100 tokens, got " in said
    # Prompts alone are shown as the server gets the first of them.
    assert "First?<|im_end|>\n<|im_start|>assistant\n\n[then] Second?\n" in said


def test_turns_without_answers_need_a_template_that_takes_them_one_by_one_only(
    tmp_path: Path, tiny_target: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    template = tmp_path / "strict.jinja"
    template.write_text(
        "{% for m in messages %}{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}"
        "{{ raise_exception('roles must alternate') }}{% endif %}{{ m.content }}<|im_end|>{% endfor %}"
    )
    path = write(tmp_path / "rows.jsonl", {"turns": ["First?", "Second?"]})
    assert main([path, "--target", str(tiny_target), f"prompts.chat_template={template}"]) == 0
    assert "1 row, 1 usable, 0 dropped" in capsys.readouterr().out


def test_files_of_a_folder_are_listed_with_those_that_are_not_read(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "folder"
    folder.mkdir()
    (folder / "notes.txt").write_text("x")
    write(folder / "a.jsonl", talk("One?", "1."), {})
    write(folder / "b.jsonl", talk("Two?", "2.", id="a"), talk("Three?", "3.", id="a"))
    assert main([str(folder), "--rejected", str(tmp_path / "side.jsonl")]) == 1
    said = capsys.readouterr().out
    assert f"  {folder}/a.jsonl: 2 rows\n  {folder}/b.jsonl: 2 rows\n" in said
    assert f"  {folder}/notes.txt: in no form that is read, left out\n" in said
    assert f"    {folder}/b.jsonl:2: id must be unique, got 'a' again (first on line 1 of {folder}/b.jsonl" in said


def test_a_side_file_of_an_earlier_look_does_not_stay(tmp_path: Path) -> None:
    path = write(tmp_path / "rows.jsonl", talk("One?", "1."), {})
    assert main([path]) == 1
    assert Path("ckpts/rows.jsonl.rejected.jsonl").exists()
    write(tmp_path / "rows.jsonl", talk("One?", "1."))
    assert main([path]) == 0
    assert not Path("ckpts/rows.jsonl.rejected.jsonl").exists()
    assert main([f"{tmp_path}/*.jsonl"]) == 0


def test_what_cannot_be_reported_is_refused_at_once(tmp_path: Path) -> None:
    path = write(tmp_path / "rows.jsonl", talk("One?", "1."))
    wrong = ["--server", "http://x", "--show", "-1", "--rejected", path, "held_out_share=2", "prompts.max_tokens=0"]
    with pytest.raises(UserError) as caught:
        main([path, *wrong])
    assert str(caught.value).splitlines() == [
        "--server must come with --target DIRECTORY, got none; its rendering is compared with the target's here",
        "--show must be 0 or more, got -1",
        "held_out_share must be from 0 to 1, got 2.0",
        "prompts.max_tokens must be 1 or more, got 0",
        f"--rejected must be another file than the prompts, got {path!r}; it is written anew",
    ]
    assert json.loads(Path(path).read_text()) == talk("One?", "1.")


def test_a_training_split_without_rows_or_drafts_is_said(
    tmp_path: Path, tiny_target: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = write(tmp_path / "rows.jsonl", talk("One?", "1."))
    assert main([path, "--target", str(tiny_target), "held_out_share=1"]) == 0
    assert "no row is left to train on, 1 row held out (held_out_share=1.0)" in capsys.readouterr().out
    path = write(tmp_path / "rows.jsonl", {"input_ids": [1, 2], "loss_mask": [0, 1]})
    assert main([path, "--target", str(tiny_target), "draft.draft_vocab_size=48"]) == 0
    said = capsys.readouterr().out
    assert "tokens cover 100.00%" in said
    assert "lost to the rest" not in said  # an answer of one token takes no draft


def test_the_ceiling_of_tau_is_taken_over_answers_and_not_over_rows(tmp_path: Path, tiny_target: Path) -> None:
    rows = [{"messages": talk("One?", "1.")["messages"] * 3}]
    prompts = PromptsConfig(write(tmp_path / "rows.jsonl", *rows))
    config = InspectConfig(TargetConfig(str(tiny_target)), prompts, held_out_share=0)
    renderer = ChatRenderer(load_tokenizer(str(tiny_target), False), {})
    counts = TokenCounts()
    look_through(config, renderer, tmp_path / "side.jsonl", counts)
    answer = load_tokenizer(str(tiny_target), False)("1.<|im_end|>", add_special_tokens=False)["input_ids"]
    assert [ids.tolist() for ids in counts.answers] == [answer] * 3


def test_calls_thoughts_and_ids_are_shown_without_a_target(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    called = {"tool_calls": [{"id": "a", "function": {"name": "f", "arguments": "{}"}}], "reasoning_content": "Hm."}
    rows = [
        {"messages": [{"role": "user", "content": "Hi"}, {"role": "assistant", **called}]},
        {"input_ids": [1, 2, 3], "loss_mask": [0, 1, 1]},
    ]
    assert main([write(tmp_path / "rows.jsonl", *rows)]) == 0
    said = capsys.readouterr().out
    assert 'assistant: (Hm.) [{"id": "a", "type": "function", "function": {"name": "f", "arguments": {}}}]' in said
    assert "[1] [2, 3]" in said
    assert "prompts only: 0 rows, with tool calls: 1 row" in said
    assert "without --target nothing is rendered" in said


def test_a_template_that_never_renders_twice_the_same_ends_in_counts(
    tmp_path: Path, tiny_target: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    template = tmp_path / "now.jinja"
    template.write_text(
        "{{ range(100000) | random }}{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n"
        "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    )
    path = write(tmp_path / "rows.jsonl", *[talk(f"{i}?", "So.", id=i) for i in range(20)])
    settings = ["--show", "20", f"prompts.chat_template={template}"]
    main([path, "--target", str(tiny_target), *settings])
    assert "20 rows, " in capsys.readouterr().out
