"""The demo's stages: a stage that is interrupted saves what it has, and the demo says how to go on."""

import os
import signal
import subprocess
import sys

import pytest
from conftest import REPOSITORY

STAGE = """
import signal, sys, time
signal.signal(signal.SIGINT, signal.default_int_handler)
try:
    print("begun", flush=True)
    time.sleep(60)
except KeyboardInterrupt:
    time.sleep(0.5)
    print("saved", flush=True)
    sys.exit(130)
"""
DEMO = """
import signal, sys
from eagle3.cli import run_command
from examples import demo
signal.signal(signal.SIGINT, signal.default_int_handler)  # as in a shell's foreground
run_command(lambda: demo.run_stage("extract", [sys.executable, "-c", sys.argv[1]]))
"""


def test_an_interrupted_stage_saves_before_the_demo_ends() -> None:
    pytest.importorskip("psutil", reason="the demo needs it")
    with subprocess.Popen(
        [sys.executable, "-c", DEMO, STAGE],
        cwd=REPOSITORY,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    ) as process:
        assert process.stdout is not None
        while process.stdout.readline() not in ("begun\n", ""):
            pass
        os.killpg(process.pid, signal.SIGINT)  # as a terminal does: to the demo and to its stage
        printed, errors = process.communicate(timeout=60)
    assert printed == "saved\n"
    assert errors == "the demo's extract stage was interrupted; the same command goes on where it stopped\n"
    assert process.returncode == 130
