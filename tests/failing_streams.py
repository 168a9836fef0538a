"""Trains as train.py does, in a process that a test launches, on a target in this process that fails as servers may.

The first arguments are a rank, the number of its call to the target that finds no server (-1: none), and the ids of
samples whose requests are refused on every rank, with commas between; train.py's follow.
"""

import os
import sys
from collections.abc import Iterator, Sequence
from unittest import mock

import train
from eagle3.capture.engine import SetAside
from eagle3.capture.inprocess import TransformersEngine
from eagle3.capture.launch import ServerError
from eagle3.capture.streaming import StateMaker
from eagle3.cli import run_command
from eagle3.features.record import FeatureSample
from eagle3.features.stream import TokenSample


def main() -> None:
    rank, failing_call, refused = sys.argv[1:4]
    del sys.argv[1:4]
    refused_ids, num_calls = set(refused.split(",")), [0]
    make, capture_each = StateMaker.__call__, TransformersEngine.capture_each

    def make_or_fail(maker: StateMaker, tokens: Sequence[TokenSample]) -> list[FeatureSample | None]:
        num_calls[0] += 1
        if os.environ.get("RANK", "0") == rank and num_calls[0] == int(failing_call):
            raise ServerError("the server must answer within 60 s, got ConnectionError; start it again")

        def some(engine: TransformersEngine, sequences: Iterator[Sequence[int]]) -> Iterator[tuple[int, object]]:
            for place, result in capture_each(engine, sequences):
                is_refused = tokens[place].sample_id in refused_ids
                yield place, SetAside("the server refused it") if is_refused else result

        with mock.patch.object(TransformersEngine, "capture_each", some):
            return make(maker, tokens)

    with mock.patch.object(StateMaker, "__call__", make_or_fail):
        train.main()


if __name__ == "__main__":
    run_command(main)
