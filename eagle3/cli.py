"""What every command shares: arguments, logging, and errors as one sentence."""

import argparse
import ctypes
import logging
import os
import select
import signal
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from eagle3.config import UserError
from eagle3.files import FULL
from eagle3.loading import INTERRUPTED

PARENT_DEATH_SIGNAL = 1  # PR_SET_PDEATHSIG of Linux's prctl


def command_parser(description: str, default_config: str) -> argparse.ArgumentParser:
    """Returns a parser with the arguments that all commands take: --config and `section.field=value` overrides."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--config", default=default_config, help=f"a YAML file (default: {default_config})")
    parser.add_argument("overrides", nargs="*", metavar="section.field=value", help="settings that win over the file")
    return parser


def parse_arguments(parser: argparse.ArgumentParser, argv: Sequence[str] | None = None) -> argparse.Namespace:
    """Returns the arguments, options and overrides in any order; `argv` is the command line's unless given."""
    return parser.parse_intermixed_args(argv)


def check_given_once(overrides: Sequence[str], setting: str, option: str) -> None:
    """Compares the overrides with an option that sets the same.

    Raises:
        UserError: one of them does.
    """
    for override in overrides:
        if override.partition("=")[0] == setting:
            raise UserError(f"{setting} must be given once, got {override!r} and {option}; leave one away")


def file_to_write(text: str) -> Path:
    """Reads from the command line where a file is to be written, so that no work is done for nothing."""
    if Path(text).is_dir():
        raise argparse.ArgumentTypeError(f"must be a file, got the directory {text!r}")
    return Path(text)


def directory_to_write(text: str) -> Path:
    """Reads from the command line where a directory is to be written."""
    if "://" in text:
        raise argparse.ArgumentTypeError(f"must be a directory: nothing is written to URLs, got {text!r}")
    if Path(text).exists() and not Path(text).is_dir():
        raise argparse.ArgumentTypeError(f"must be a directory, got the file {text!r}")
    return Path(text)


def run_command(main: Callable[[], None]) -> None:
    """Runs a command's main function; what is not a fault of the program ends it with one message and no traceback.

    Exit code 2 is a user's mistake, or a file that the system refuses; 1 a computation that left the finite numbers, or
    a process of the run that is gone; 141 and 130 are a shell's for a pipe that was closed and for Ctrl-C.
    """
    try:
        logging.basicConfig(level=logging.INFO, format="%(asctime)s %(message)s", datefmt="%H:%M:%S", stream=sys.stderr)
        try:
            main()
        except SystemExit:
            sys.stdout.flush()  # where it can still be said that nobody reads it
            raise
        sys.stdout.flush()
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)
    except ChildProcessError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(1)
    except BrokenPipeError:
        if not _is_unread(sys.stdout.fileno()):  # another pipe, a server's
            raise
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # what is left of it goes nowhere
        sys.exit(141)
    except OSError as error:
        paths = " -> ".join(str(name) for name in (error.filename, error.filename2) if name is not None)
        if error.errno in FULL:
            print(
                f"error: the disk must have room for what is written, got {error.strerror!r} "
                f"({paths or 'an open file'}); make room, and go on from what is there",
                file=sys.stderr,
            )
            sys.exit(2)
        if not paths:  # no file of the user's
            raise
        print(
            f"error: every file must be of the kind and with the rights that the run needs, got {error.strerror!r} "
            f"({paths}); correct the path or its rights, or move away what is there",
            file=sys.stderr,
        )
        sys.exit(2)
    except FloatingPointError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(1)
    except KeyboardInterrupt:
        sys.stderr.write(INTERRUPTED)
        sys.exit(130)


def follow_launcher() -> None:
    """Has this process get a SIGTERM when its launcher dies, if that is accelerate's for one process.

    It passes no signal on, so that one that is told to stop would leave its training alone. torchrun does, and what a
    shell started is to outlive it.
    """
    command = Path(f"/proc/{os.getppid()}/cmdline")
    if "TORCHELASTIC_RUN_ID" not in os.environ and command.exists() and b"accelerate" in command.read_bytes():
        ctypes.CDLL(None).prctl(PARENT_DEATH_SIGNAL, signal.SIGTERM)


def _is_unread(descriptor: int) -> bool:
    """Tells whether a file is a pipe whose reader has gone, as `head` does when it has read enough."""
    poll = select.poll()
    poll.register(descriptor, 0)
    return any(events & select.POLLERR for _, events in poll.poll(0))
