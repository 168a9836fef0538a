"""`python -m eagle3 features`: look into stores, check them, and make new ones of them."""

import argparse
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import get_args

from eagle3.capture.importing import Last, LossMask
from eagle3.config import StoreConfig
from eagle3.features.codec import CodecName
from eagle3.features.looking import inspect, stats, verify
from eagle3.features.making import convert, drop, import_, merge

STORE = "a store: its directory, or a URL that fsspec reads"
OUT = "the new store's directory; one that the same command began is gone on with"
OF_NEW_STORE = "of the new store; exact keeps the target's own bf16 or fp32 numbers"


def main(argv: Sequence[str]) -> int:
    """Runs one of the commands; returns 1 where a store is damaged."""
    parser = argparse.ArgumentParser(prog="eagle3 features", description=__doc__)
    commands = parser.add_subparsers(required=True, metavar="COMMAND")

    def add(name: str, run: Callable[[argparse.Namespace], int | None], text: str) -> argparse.ArgumentParser:
        command = commands.add_parser(name, help=text, description=text)
        command.set_defaults(run=run)
        return command

    command = add("inspect", inspect, "prints what a store says of itself, and its first samples")
    command.add_argument("store", help=STORE)
    command = add("verify", verify, "reads every byte of stores and compares it with what was written")
    command.add_argument("stores", nargs="+", metavar="store", help=STORE)
    command = add("stats", stats, "prints lengths, and what each codec would cost in bytes and in error")
    command.add_argument("store", help=STORE)
    command.add_argument(
        "--samples", type=positive, default=50, help="samples that the errors are measured on (default: %(default)s)"
    )
    command.add_argument("--out", type=Path, help="also write the errors as JSON")
    command = add("merge", merge, "makes one store of several")
    command.add_argument("stores", nargs="+", metavar="store", help=STORE)
    command.add_argument("out", type=directory, help=OUT)
    add_writing_arguments(command)
    command = add("convert", convert, "makes a store in another codec")
    command.add_argument("store", help=STORE)
    command.add_argument("out", type=directory, help=OUT)
    add_writing_arguments(command, codec_is_required=True)
    command = add("drop", drop, "makes a store without some samples")
    command.add_argument("store", help=STORE)
    command.add_argument("out", type=directory, help=OUT)
    command.add_argument("--ids", type=Path, help="a file of the ids of samples to drop, one a line")
    command.add_argument("--max-tokens", type=positive, help="drop samples that have more tokens")
    add_writing_arguments(command)
    command = add("import", import_, "makes a store of features that others extracted")
    command.add_argument(
        "source", type=Path, help="a directory of SpecForge's .ckpt (or .ckpt.gz) or vLLM's .safetensors files"
    )
    command.add_argument("out", type=directory, help=OUT)
    command.add_argument("--target", type=Path, required=True, help="the Hugging Face directory that they are of")
    command.add_argument("--layers", type=int, nargs="+", help="the layer that each state but the last enters, 0-based")
    command.add_argument(
        "--last",
        choices=get_args(Last),
        help="side of the target's final norm that the last state is from: SpecForge's after-norm, vLLM's before-norm",
    )
    command.add_argument(
        "--loss-mask",
        choices=get_args(LossMask),
        default="file",
        help="file: that of the files; all: every token is taken for the target's (default: %(default)s)",
    )
    command.add_argument(
        "--codec", choices=get_args(CodecName), default="exact", help=f"{OF_NEW_STORE} (default: %(default)s)"
    )
    add_shard_bytes(command)
    command.add_argument("--dry-run", action="store_true", help="run the gates, and write nothing")
    arguments = parser.parse_args(argv)
    return arguments.run(arguments) or 0


def add_writing_arguments(command: argparse.ArgumentParser, *, codec_is_required: bool = False) -> None:
    """Adds what all commands take that write a store."""
    of_sources = "" if codec_is_required else " (default: the sources')"
    command.add_argument(
        "--codec", choices=get_args(CodecName), required=codec_is_required, help=f"{OF_NEW_STORE}{of_sources}"
    )
    add_shard_bytes(command)
    command.add_argument("--dry-run", action="store_true", help="say what would be written, and write nothing")


def add_shard_bytes(command: argparse.ArgumentParser) -> None:
    """Adds how long a shard of the new store gets."""
    default = StoreConfig(path="").shard_bytes
    command.add_argument("--shard-bytes", type=positive, default=default, help="of a shard (default: %(default)s)")


def positive(text: str) -> int:
    """Reads a number of at least 1 from the command line."""
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"must be a whole number of at least 1, got {text!r}")
    return int(text)


def directory(text: str) -> Path:
    """Reads where a store is to be written."""
    if "://" in text:
        raise argparse.ArgumentTypeError(f"must be a directory: stores are not written to URLs, got {text!r}")
    return Path(text)
