"""What a run is: the processes of one training job find out the same id, and those of another job another one."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest

from qreward_plugins.journal.journal import VARIABLE, current_run

PROGRAM = "from qreward_plugins.journal.journal import current_run; print(current_run())"
LAUNCHER = f"""
import subprocess, sys
for _ in range(2):
    subprocess.run([sys.executable, "-c", {PROGRAM!r}], check=True)
"""


@pytest.fixture(autouse=True)
def nothing_is_shared(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in (VARIABLE, "LOCAL_WORLD_SIZE", "TORCHELASTIC_RESTART_COUNT"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.delitem(sys.modules, "ray", raising=False)


def launched(**variables: str) -> list[str]:
    """The runs of two workers that a process of its own has started."""
    done = subprocess.run(
        [sys.executable, "-c", LAUNCHER], env=os.environ | variables, stdout=subprocess.PIPE, text=True, check=True
    )
    return done.stdout.split()


def test_without_anything_shared_each_call_is_a_run_of_its_own() -> None:
    found = {current_run() for _ in range(3)}
    assert len(found) == 3
    assert {len(run) for run in found} == {8}


def test_the_environment_names_a_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(VARIABLE, " job-7 ")
    assert current_run() == "job-7"
    monkeypatch.setenv(VARIABLE, " ")
    assert current_run() != current_run()


@contextmanager
def job(monkeypatch: pytest.MonkeyPatch, context: Any) -> Iterator[None]:
    """This process is a worker of a job of Ray."""
    ray = SimpleNamespace(is_initialized=lambda: True, get_runtime_context=lambda: context)
    with monkeypatch.context() as here:
        here.setitem(sys.modules, "ray", ray)
        yield


def worker(session: str, number: str) -> SimpleNamespace:
    return SimpleNamespace(get_session_name=lambda: session, get_job_id=lambda: number)


def test_a_job_of_ray_is_a_run_and_the_first_job_of_another_cluster_is_another(monkeypatch: pytest.MonkeyPatch) -> None:
    found = []
    for session, number in (("a", "01"), ("a", "01"), ("a", "02"), ("b", "01")):
        with job(monkeypatch, worker(session, number)):
            found.append(current_run())
    assert found[0] == found[1]
    assert len(set(found)) == 3


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux has /proc")
def test_workers_of_one_launcher_are_a_run_until_it_starts_them_again(monkeypatch: pytest.MonkeyPatch) -> None:
    assert len(set(launched())) == 2
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    one, same = launched()
    assert one == same
    assert one not in launched()
    here = current_run()
    assert current_run() == here
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "1")
    assert current_run() != here
