"""What every command shares."""

import argparse
import contextlib
import errno
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from conftest import REPOSITORY

from eagle3.__main__ import run_subcommand
from eagle3.cli import command_parser, directory_to_write, file_to_write, parse_arguments, run_command
from eagle3.config import UserError
from eagle3.loading import loading


def test_options_and_overrides_come_in_any_order() -> None:
    parser = command_parser("x", "default.yaml")
    arguments = parse_arguments(parser, ["a.b=1", "--config", "mine.yaml", "c=2"])
    assert (arguments.config, arguments.overrides) == ("mine.yaml", ["a.b=1", "c=2"])


def test_a_users_mistake_prints_its_message_alone(capsys: pytest.CaptureFixture[str]) -> None:
    def main() -> None:
        raise UserError("path must be a file, got 'x'")

    with pytest.raises(SystemExit) as exit_info:
        run_command(main)
    assert exit_info.value.code == 2
    assert capsys.readouterr().err == "error: path must be a file, got 'x'\n"


def test_an_interrupt_ends_with_a_word(capsys: pytest.CaptureFixture[str]) -> None:
    def main() -> None:
        raise KeyboardInterrupt

    with pytest.raises(SystemExit) as exit_info:
        run_command(main)
    assert exit_info.value.code == 130
    assert capsys.readouterr().err == "interrupted\n"


@pytest.mark.parametrize("command", [["train.py"], ["extract.py"], ["evaluate.py"], ["-m", "eagle3", "compare", "x"]])
@pytest.mark.parametrize("module", ["argparse", "torch"])  # of the first and of the last that are imported
def test_an_interrupt_while_modules_are_imported_ends_with_the_same_word(
    tmp_path: Path, command: list[str], module: str
) -> None:
    """A module in its place says when it is imported, and takes an exception for its own."""
    (tmp_path / f"{module}.py").write_text(
        "import time\nprint('importing', flush=True)\ntry:\n    time.sleep(60)\nexcept BaseException:\n    pass\n"
    )
    # As in a shell's foreground: a background one would have it ignored.
    script = (
        "import os, signal, sys\nsignal.signal(signal.SIGINT, signal.default_int_handler)\nos.execv(sys.executable, "
        "[sys.executable, *sys.argv[1:]])"
    )
    settings = {"train.py": ["target.path=x", "data.path=x"], "extract.py": ["target.path=x", "store.path=x"]}
    arguments = [*command, *settings.get(command[0], [])]
    with subprocess.Popen(
        [sys.executable, "-c", script, *arguments],
        cwd=REPOSITORY,
        env=os.environ | {"PYTHONPATH": str(tmp_path)},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "importing\n"
        process.send_signal(signal.SIGINT)
        assert process.communicate(timeout=60) == ("", "interrupted\n")
    assert process.returncode == 130


def test_an_interrupt_that_is_ignored_stays_so_while_imports_last() -> None:
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        with loading():
            os.kill(os.getpid(), signal.SIGINT)
        assert signal.getsignal(signal.SIGINT) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGINT, before)


def test_a_file_that_the_system_refuses_is_one_sentence(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A directory in the way of a file, a file in the way of a directory."""
    (tmp_path / "file").write_text("")
    for action, said in (
        (lambda: (tmp_path / "file" / "store").mkdir(), "'Not a directory'"),
        (lambda: tmp_path.read_text(), "'Is a directory'"),
    ):
        with pytest.raises(SystemExit) as exit_info:
            run_command(action)  # type: ignore[arg-type] # what it returns is of no interest
        assert exit_info.value.code == 2
        line = capsys.readouterr().err
        assert re.fullmatch(
            rf"error: every file must be of the kind .*, got {said} \({tmp_path}.*\); correct .*\n", line
        )


@pytest.mark.parametrize(("arguments", "where"), [((), "an open file"), (("step-000005",), "step-000005")])
def test_a_full_disk_is_one_sentence(
    capsys: pytest.CaptureFixture[str], arguments: tuple[str, ...], where: str
) -> None:
    """Python names the file that it opens, and none that it writes to."""

    def main() -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), *arguments)

    with pytest.raises(SystemExit) as exit_info:
        run_command(main)
    assert exit_info.value.code == 2
    assert capsys.readouterr().err == (
        f"error: the disk must have room for what is written, got 'No space left on device' ({where}); "
        f"make room, and go on from what is there\n"
    )


def test_an_error_of_the_system_without_a_file_keeps_its_traceback() -> None:
    def main() -> None:
        raise OSError(errno.EIO, "no file of the user's")

    with pytest.raises(OSError, match="no file of the user's"):
        run_command(main)


def test_numbers_that_leave_the_finite_ones_end_with_their_message(capsys: pytest.CaptureFixture[str]) -> None:
    def main() -> None:
        raise FloatingPointError("the loss must be finite, got nan")

    with pytest.raises(SystemExit) as exit_info:
        run_command(main)
    assert exit_info.value.code == 1
    assert capsys.readouterr().err == "error: the loss must be finite, got nan\n"


def test_a_process_of_the_run_that_is_gone_ends_it_with_a_message(capsys: pytest.CaptureFixture[str]) -> None:
    def main() -> None:
        raise ChildProcessError("every rank must be alive, got no word from rank 1")

    with pytest.raises(SystemExit) as exit_info:
        run_command(main)
    assert exit_info.value.code == 1
    assert capsys.readouterr().err == "error: every rank must be alive, got no word from rank 1\n"


@pytest.mark.parametrize("ending", ["", "; sys.exit(0)"])
def test_a_reader_that_has_read_enough_is_no_error(ending: str) -> None:
    script = f"import sys; from eagle3.cli import run_command; run_command(lambda: exec('print(1){ending}'))"
    ours, theirs = os.pipe()
    os.close(ours)
    done = subprocess.run([sys.executable, "-c", script], stdout=theirs, stderr=subprocess.PIPE, check=False)
    os.close(theirs)
    assert (done.returncode, done.stderr) == (141, b"")


def test_a_broken_pipe_that_is_not_ours_keeps_its_traceback() -> None:
    script = (
        "from eagle3.cli import run_command\ndef main(): raise BrokenPipeError(32, 'Broken pipe')\nrun_command(main)"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert "BrokenPipeError" in done.stderr


def test_where_something_is_to_be_written_is_looked_at_before_the_work(tmp_path: Path) -> None:
    file, new = tmp_path / "file", tmp_path / "new"
    file.write_text("")
    assert [file_to_write(str(path)) for path in (file, new)] == [file, new]
    assert [directory_to_write(str(path)) for path in (tmp_path, new)] == [tmp_path, new]
    with pytest.raises(argparse.ArgumentTypeError, match=f"must be a file, got the directory '{tmp_path}'"):
        file_to_write(str(tmp_path))
    with pytest.raises(argparse.ArgumentTypeError, match=f"must be a directory, got the file '{file}'"):
        directory_to_write(str(file))
    with pytest.raises(argparse.ArgumentTypeError, match="nothing is written to URLs, got 's3://b/o'"):
        directory_to_write("s3://b/o")


@pytest.mark.parametrize(
    "arguments",
    [
        ["simulate", "s", "--target", "t", "--drafter", "d", "--out", "DIR"],
        ["questions", "math", "--out", "DIR"],
        ["prompts", "p", "--rejected", "DIR"],
        ["features", "stats", "s", "--out", "DIR"],
        ["compare", "a", "b", "--out", "FILE"],
        ["export", "c", "--out", "FILE"],
        ["features", "merge", "a", "b", "FILE"],
    ],
)
def test_every_command_looks_where_it_is_to_write(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], arguments: list[str]
) -> None:
    (tmp_path / "file").write_text("")
    paths = {"DIR": str(tmp_path), "FILE": str(tmp_path / "file")}
    with pytest.raises(SystemExit) as exit_info:
        run_subcommand([paths.get(each, each) for each in arguments])
    assert exit_info.value.code == 2
    assert re.search(
        r"argument .*: must be a (file, got the directory|directory, got the file) '", capsys.readouterr().err
    )


@pytest.mark.parametrize(("shell", "outlives"), [("shell", True), ("accelerate", False)])
def test_a_command_ends_with_accelerate_and_outlives_its_shell(shell: str, *, outlives: bool) -> None:
    """A shell whose name is the launcher's stands for it."""
    child = (
        "import time; from eagle3.cli import follow_launcher; follow_launcher(); print(1, flush=True); time.sleep(60)"
    )
    script = f"{sys.executable} -c '{child}' & echo $!; read _"
    with subprocess.Popen(
        ["bash", "-c", script, shell],
        cwd=REPOSITORY,
        env={name: value for name, value in os.environ.items() if name != "TORCHELASTIC_RUN_ID"}
        | {"ACCELERATE_USE_CPU": "false"},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as launcher:
        assert launcher.stdin is not None
        assert launcher.stdout is not None
        process_id = int(launcher.stdout.readline())
        assert launcher.stdout.readline() == "1\n"
        launcher.stdin.close()
        launcher.wait()
        try:
            ended = _has_ended(process_id, within_seconds=1.0 if outlives else 20.0)
            assert ended is not outlives
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.kill(process_id, signal.SIGKILL)


def _has_ended(process_id: int, within_seconds: float) -> bool:
    deadline = time.monotonic() + within_seconds
    while time.monotonic() < deadline:
        state = Path(f"/proc/{process_id}/stat")
        if not state.exists() or state.read_text().rpartition(")")[2].split()[0] == "Z":
            return True
        time.sleep(0.02)
    return False
