"""Copies of rows and of benchmark questions are found by the runs of words that they share."""

import json
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import psutil
import pytest

from eagle3.config import PromptsConfig, UserError
from eagle3.prompts.conversations import BadRow, Conversation
from eagle3.prompts.hashes import Places, SeenHashes
from eagle3.prompts.screening import QuestionSets, words_of
from eagle3.prompts.workers import examine_rows

ROOT = Path(__file__).resolve().parent.parent
WORDS = [f"word{i}" for i in range(3000)]


def ignore() -> Any:
    return lambda row: row.id


def outcomes(tmp_path: Path, prompts: list[str], **settings: Any) -> list[str | None]:
    """Returns for each prompt why it is dropped."""
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(json.dumps({"id": i, "prompt": text}) + "\n" for i, text in enumerate(prompts)))
    rows = examine_rows(PromptsConfig(str(path), **settings), ignore, keep_rows=False)
    return [row.row.reason if isinstance(row.row, BadRow) else None for row in rows]


def test_words_have_no_case_and_no_punctuation_and_unspaced_scripts_count_by_characters() -> None:
    assert words_of("Hello, WORLD-wide \u4f60\u597d!  na\u00efve_1") == [
        "hello", "world", "wide", "\u4f60", "\u597d", "na\u00efve_1",
    ]  # fmt: skip


def test_almost_the_same_question_is_dropped_and_names_the_first(tmp_path: Path) -> None:
    chance = random.Random(0)
    base = chance.choices(WORDS, k=120)
    touched = [*base[:60], "changed", *base[61:]]
    prompts = [" ".join(base), " ".join(chance.choices(WORDS, k=120)), " ".join(touched).upper() + "!", "Hi", "hi?"]
    found = outcomes(tmp_path, prompts, near_duplicates="drop")
    assert found == [
        None, None, "row must be unlike the ones before it, got almost line 1", None,
        "row must be unlike the ones before it, got almost line 4",
    ]  # fmt: skip
    assert outcomes(tmp_path, prompts) == [None] * 5


def test_unlike_questions_stay(tmp_path: Path) -> None:
    chance = random.Random(1)
    start = " ".join(chance.choices(WORDS, k=20))  # a third is shared
    prompts = [start + " " + " ".join(chance.choices(WORDS, k=40)) for _ in range(300)]
    assert outcomes(tmp_path, prompts, near_duplicates="drop") == [None] * 300


def test_rows_with_a_measured_question_are_dropped(tmp_path: Path) -> None:
    chance = random.Random(2)
    question, other = " ".join(chance.choices(WORDS, k=30)), " ".join(chance.choices(WORDS, k=30))
    questions = tmp_path / "bench.jsonl"
    questions.write_text(json.dumps({"prompt": question}) + "\n" + json.dumps({"prompt": "What is 2 + 2?"}) + "\n")
    words = question.split()
    prompts = [
        "Please answer: " + " ".join(words[5:15]) + " and so on",  # ten of its words in a row
        "Please answer: " + " ".join(words[5:14]) + " and so on",  # nine
        other,
        "what is 2 2",
        "What is 2 + 2 in base 3?",
    ]
    reason = "row must be none of the questions that are measured, got one of bench.jsonl"
    assert outcomes(tmp_path, prompts, exclude=[str(questions)]) == [reason, None, None, reason, None]


def test_a_question_set_without_questions_is_named(tmp_path: Path) -> None:
    path = tmp_path / "bench.jsonl"
    path.write_text('{"input_ids": [1], "loss_mask": [1]}\n')
    with pytest.raises(
        UserError, match=r"a question set must have questions, got none \('.*bench\.jsonl'\); check pro"
    ):
        QuestionSets([str(path)])


def test_a_question_set_that_is_not_there_is_said_of_its_setting(tmp_path: Path) -> None:
    wanted = (
        r"prompts\.exclude must name question sets that can be read: prompts must be a file, got no file at '.*/none'"
    )
    with pytest.raises(UserError, match=wanted):
        QuestionSets([str(tmp_path / "none")])


def test_a_question_set_with_a_row_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    path = tmp_path / "bench.jsonl"
    path.write_text('{"prompt": "Why?"}\n{"question_text": "Why not?"}\n')
    said = (
        r"every row of a question set must be readable, got one that is not: row must have .* \(.*, line 2\); correct"
    )
    for num_workers in (0, 2):
        with pytest.raises(UserError, match=said):
            outcomes(tmp_path, ["Why?"], exclude=[str(path)], num_workers=num_workers)


def test_rows_that_come_tokenised_are_compared_by_their_ids_and_not_with_questions(tmp_path: Path) -> None:
    path, questions = tmp_path / "rows.jsonl", tmp_path / "bench.jsonl"
    given = [list(range(i, i + 40)) for i in (0, 500, 0, 900)]
    rows = [{"id": i, "input_ids": ids, "loss_mask": [1] * 40} for i, ids in enumerate(given)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    questions.write_text('{"prompt": "Why?"}\n')
    copies = examine_rows(PromptsConfig(str(path), near_duplicates="drop"), ignore, keep_rows=False)
    assert [row.row.line for row in copies if isinstance(row.row, BadRow)] == [3]
    asked = examine_rows(PromptsConfig(str(path), exclude=[str(questions)]), ignore, keep_rows=False)
    reasons = {row.row.reason for row in asked if isinstance(row.row, BadRow)}
    assert reasons == {"row must have text to be compared with the questions that are measured, got token ids"}


def test_a_row_of_another_file_is_named_with_it(tmp_path: Path) -> None:
    for name, number in (("a", 1), ("b", 2)):
        row = {"id": number, "prompt": "Which of the two comes first, and which one comes again?"}
        (tmp_path / f"{name}.jsonl").write_text(json.dumps(row) + "\n" + json.dumps({"id": 3, "prompt": name}) + "\n")
    rows = list(examine_rows(PromptsConfig(str(tmp_path), near_duplicates="drop"), ignore, keep_rows=False))
    first = tmp_path / "a.jsonl"
    reasons = [row.row.reason for row in rows if isinstance(row.row, BadRow)]
    assert reasons == [
        f"row must be unlike the ones before it, got almost line 1 of {first}",
        f"id must be unique, got '3' again (first on line 2 of {first}; a row without one goes by its content)",
    ]


def kill_this_process() -> Any:
    os.kill(os.getpid(), signal.SIGKILL)


def test_a_process_that_is_killed_is_named(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text('{"prompt": "Hi?"}\n' * 3)
    said = r"must live until the last row, got one of 2 that was killed, .*; lower prompts\.num_workers"
    with pytest.raises(UserError, match=said):
        list(examine_rows(PromptsConfig(str(path), num_workers=2), kill_this_process, keep_rows=False))


def test_hashes_are_found_again_as_in_a_dict() -> None:
    chance = random.Random(3)
    seen, expected, places = SeenHashes(), dict[int, int](), Places()
    for line in (places.number(line, str(line % 7000 < 3500)) for line in range(1, 20_000)):
        hashed = chance.choice([0, 1, 1024, 2**64 - 1, chance.getrandbits(64), chance.getrandbits(12)]) or 1
        assert seen.first_place(hashed, line) == expected.get(hashed)
        expected.setdefault(hashed, line)


def refuse_nothing() -> Any:
    return lambda row: len(row.messages)


def test_rows_come_back_in_order_from_several_processes(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    lines = [json.dumps({"id": i % 1500, "prompt": "Hi?"}) if i % 7 else "oops" for i in range(2000)]
    path.write_text("\n".join(lines))
    alone, shared = (
        list(examine_rows(PromptsConfig(str(path), num_workers=num), refuse_nothing, keep_rows=False)) for num in (0, 2)
    )
    assert shared == alone
    assert [row.row.line for row in shared] == list(range(1, 2001))
    assert {row.result for row in shared if isinstance(row.row, Conversation)} == {1}
    assert {row.row.kind for row in shared if isinstance(row.row, BadRow)} == {"malformed", "id again"}


def take_interrupts() -> None:
    """A shell's background jobs ignore them, and so would all that a test there starts."""
    signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.mark.parametrize("sent", [signal.SIGINT, signal.SIGKILL])
def test_no_process_outlives_the_command_and_none_but_it_answers_an_interrupt(
    tmp_path: Path, sent: signal.Signals
) -> None:
    path = tmp_path / "rows.jsonl"
    with path.open("w") as file:
        file.writelines(f'{{"id": {i}, "prompt": "Question {i}?"}}\n' for i in range(400_000))
    command = [sys.executable, "-m", "eagle3", "prompts", str(path), "prompts.num_workers=2"]
    with (tmp_path / "said").open("w") as said:
        running = subprocess.Popen(
            command, stdout=said, stderr=said, start_new_session=True, cwd=tmp_path,
            env=os.environ | {"PYTHONPATH": str(ROOT)}, preexec_fn=take_interrupts,
        )  # fmt: skip
    workers: list[psutil.Process] = []
    deadline = time.monotonic() + 60
    while len(workers) < 2 and time.monotonic() < deadline and running.poll() is None:
        workers = [each for each in psutil.Process(running.pid).children() if "spawn_main" in " ".join(each.cmdline())]
        time.sleep(0.05)
    assert len(workers) == 2, (tmp_path / "said").read_text()
    if sent == signal.SIGINT:
        os.killpg(running.pid, sent)  # as a terminal does
    else:
        running.kill()
    running.wait(60)
    _, alive = psutil.wait_procs(workers, timeout=30)
    assert alive == []
    if sent == signal.SIGINT:
        assert running.returncode == 130
        assert (tmp_path / "said").read_text() == "interrupted\n"


def test_a_number_of_processes_below_zero_is_named(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"prompts\.num_workers must be 0 or more, got -1; change it"):
        outcomes(tmp_path, ["Hi?"], num_workers=-1)


def test_a_file_without_rows_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"prompts must have at least one row, got an empty file \('.*rows\.jsonl'\)"):
        outcomes(tmp_path, [])


# In a process of its own: what other tests leave behind is freed, or fills up, whenever it pleases.
GROWTH = """
import sys
from pathlib import Path
from eagle3.config import PromptsConfig
from eagle3.prompts.workers import examine_rows
from test_screening import refuse_nothing

def resident_bytes():
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096

config = PromptsConfig(sys.argv[1], num_workers=0)
for count, _ in enumerate(examine_rows(config, refuse_nothing, keep_rows=False), start=1):
    if count == 20_000:
        early = resident_bytes()
print(count, resident_bytes() - early)
"""


def test_memory_does_not_grow_with_the_rows(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    with path.open("w") as file:
        for i in range(100_000):
            file.write(f'{{"id": {i}, "prompt": "Question {i}, and some words to make it as long as others are?"}}\n')
    environment = os.environ | {"PYTHONPATH": f"{ROOT / 'tests'}{os.pathsep}{ROOT}"}
    command = [sys.executable, "-c", GROWTH, str(path)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    count, grown = map(int, done.stdout.split())
    assert count == 100_000
    # 21 to 43 bytes of each row, and the old table while the new one is filled; the file has 8 MB.
    assert grown < 80_000 * 65, f"{grown} bytes more after 80,000 more rows"
