"""`eagle3 features`: looks into stores, checks them, and makes new ones of them."""

import argparse
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import get_args, get_type_hints

from eagle3.cli import directory_to_write, file_to_write
from eagle3.config import StoreConfig
from eagle3.loading import loading

CODECS = get_args(get_type_hints(StoreConfig)["codec"])
# Those of capture.importing, which needs torch.
LAST = ("after-norm", "before-norm")
LOSS_MASK = ("file", "all")
STORE = "a store: its directory, or a URL that fsspec reads"
OUT = "the new store's directory; one that the same command began is gone on with"
OF_NEW_STORE = "of the new store; exact keeps the target's own bf16 or fp32 numbers"


def main(argv: Sequence[str]) -> int:
    """Runs one of the commands; returns 1 where a store is damaged."""
    parser = argparse.ArgumentParser(prog="python -m eagle3 features", description=__doc__)
    commands = parser.add_subparsers(required=True, dest="command", metavar="COMMAND")

    def add(name: str, text: str) -> argparse.ArgumentParser:
        return commands.add_parser(name, help=text, description=text)

    command = add("inspect", "prints what a store says of itself, and its first samples")
    command.add_argument("store", help=STORE)
    command = add("verify", "reads every byte of stores and compares it with what was written")
    command.add_argument("stores", nargs="+", metavar="store", help=STORE)
    command = add("stats", "prints lengths, and what each codec would cost in bytes and in error")
    command.add_argument("store", help=STORE)
    command.add_argument(
        "--samples", type=positive, default=50, help="samples that the errors are measured on (default: %(default)s)"
    )
    command.add_argument("--out", type=file_to_write, help="also write the errors as JSON")
    command = add("merge", "makes one store of several")
    command.add_argument("stores", nargs="+", metavar="store", help=STORE)
    command.add_argument("out", type=directory_to_write, help=OUT)
    add_writing_arguments(command)
    command = add("convert", "makes a store in another codec")
    command.add_argument("store", help=STORE)
    command.add_argument("out", type=directory_to_write, help=OUT)
    add_writing_arguments(command, codec_is_required=True)
    command = add("drop", "makes a store without some samples")
    command.add_argument("store", help=STORE)
    command.add_argument("out", type=directory_to_write, help=OUT)
    command.add_argument("--ids", type=Path, help="a file of the ids of samples to drop, one a line")
    command.add_argument("--max-tokens", type=positive, help="drop samples that have more tokens")
    add_writing_arguments(command)
    command = add("import", "makes a store of features that others extracted")
    command.add_argument(
        "source", type=Path, help="a directory of SpecForge's .ckpt (or .ckpt.gz) or vLLM's .safetensors files"
    )
    command.add_argument("out", type=directory_to_write, help=OUT)
    command.add_argument("--target", type=Path, required=True, help="the Hugging Face directory that they are of")
    command.add_argument("--layers", type=int, nargs="+", help="the layer that each state but the last enters, 0-based")
    command.add_argument(
        "--last",
        choices=LAST,
        help="side of the target's final norm that the last state is from: SpecForge's after-norm, vLLM's before-norm",
    )
    command.add_argument(
        "--loss-mask",
        choices=LOSS_MASK,
        default="file",
        help="file: that of the files; all: every token is taken for the target's (default: %(default)s)",
    )
    command.add_argument("--codec", choices=CODECS, default="exact", help=f"{OF_NEW_STORE} (default: %(default)s)")
    add_shard_bytes(command)
    command.add_argument("--dry-run", action="store_true", help="run the gates, and write nothing")
    arguments = parser.parse_args(argv)
    with loading():
        from eagle3.features import looking, making
    run: dict[str, Callable[[argparse.Namespace], int | None]] = {
        "inspect": looking.inspect,
        "verify": looking.verify,
        "stats": looking.stats,
        "merge": making.merge,
        "convert": making.convert,
        "drop": making.drop,
        "import": making.import_,
    }
    return run[arguments.command](arguments) or 0


def add_writing_arguments(command: argparse.ArgumentParser, *, codec_is_required: bool = False) -> None:
    """Adds what all commands take that write a store."""
    of_sources = "" if codec_is_required else " (default: the sources')"
    command.add_argument("--codec", choices=CODECS, required=codec_is_required, help=f"{OF_NEW_STORE}{of_sources}")
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
