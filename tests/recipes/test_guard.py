"""What becomes of the trainer when the program that started it ends, or is killed."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

GUARD = Path(__file__).parents[2] / "recipes" / "verl" / "cpu" / "guard.py"

TRAINS = """
import signal, sys, time
def end(*_):
    print("asked to end", flush=True)
    sys.exit(0)
signal.signal(signal.SIGTERM, end)
print("trains", flush=True)
while True:
    time.sleep(1)
"""

STARTS = """
import subprocess, sys
subprocess.Popen(sys.argv[1:], stdin=subprocess.PIPE, start_new_session=True).wait()
"""


def guarded(program):
    return [sys.executable, str(GUARD), sys.executable, "-c", program]


@pytest.mark.parametrize(("program", "code"), [("raise SystemExit(3)", 3), ("import os; os.kill(os.getpid(), 9)", 137)])
def test_the_trainer_s_exit_code_is_told(program, code):
    with subprocess.Popen(guarded(program), stdin=subprocess.PIPE, start_new_session=True) as process:
        assert process.wait(60) == code


def test_a_trainer_whose_starter_is_killed_is_asked_to_end():
    with subprocess.Popen(
        [sys.executable, "-c", STARTS, *guarded(TRAINS)], stdout=subprocess.PIPE, text=True
    ) as starter:
        assert starter.stdout.readline() == "trains\n"
        starter.kill()
        # The end of the pipe: no process is left that holds it.
        assert starter.stdout.read() == "asked to end\n"


def test_a_signal_to_the_group_ends_the_trainer_in_order():
    with subprocess.Popen(
        guarded(TRAINS), stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, start_new_session=True
    ) as process:
        assert process.stdout.readline() == "trains\n"
        subprocess.run(["kill", "-TERM", "--", f"-{process.pid}"], check=True)
        assert process.stdout.read() == "asked to end\n"
        assert process.wait(60) == 0
