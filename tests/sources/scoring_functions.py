"""Reward functions of every kind, loaded by path as a user's would be."""

from __future__ import annotations

import asyncio
import multiprocessing
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from qreward_plugins.errors import InvalidReply, Throttled


def fields(data_source: str, solution_str: str, ground_truth: Any, extra_info: Any, bonus: float = 0.0) -> Any:
    given = [data_source, solution_str, ground_truth, extra_info]
    return {"score": 1.0 + bonus, "given": given, "pid": os.getpid()}


def of_sample(sample: Any, bonus: float = 0.0) -> Any:
    return [sample, bonus]


async def awaited(solution_str: str, **given: Any) -> Any:
    await asyncio.sleep(0)
    if solution_str == "raise":
        raise ValueError("bad sample")
    if solution_str == "exit":
        sys.exit(3)
    return {"score": 0.5}


class Awaited:
    async def __call__(self, **given: Any) -> float:
        return 0.25

    async def method(self, **given: Any) -> float:
        return 0.75


awaited_object = Awaited()


class Strange(Exception):
    """Cannot be unpickled: its constructor wants two arguments and passes one on."""

    def __init__(self, first: str, second: str) -> None:
        super().__init__(first)


RAISED = {
    "raise": ValueError("bad \x1b sample"),
    "strange": Strange("a", "b"),
    "late": asyncio.TimeoutError("too late"),  # until Python 3.11, a class of its own
    "lost": ConnectionResetError("lost"),
    "throttled": Throttled("wait", status=429, retry_after_s=2.0),
    "invalid": InvalidReply("no"),
    "stop": StopIteration(),
}


def misbehave(solution_str: str, extra_info: Any, **given: Any) -> Any:
    if solution_str in RAISED:
        raise RAISED[solution_str]
    if solution_str == "exit":
        sys.exit(3)
    if solution_str == "crash":
        os._exit(7)
    if solution_str == "segfault":
        os.kill(os.getpid(), signal.SIGSEGV)
    if solution_str == "lambda":
        return lambda: None
    if solution_str == "coroutine":
        return awaited("x")
    if solution_str == "hang":
        Path(extra_info["started"]).write_text(str(os.getpid()))
        while True:
            time.sleep(60)
    if solution_str == "family":
        child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
        Path(extra_info["started"]).write_text(f"{os.getpid()} {child.pid}")
        child.wait()
    if solution_str == "interrupt":
        os.kill(os.getpid(), signal.SIGINT)
        return os.getpid()
    if solution_str == "fork":
        with multiprocessing.get_context("spawn").Pool(1) as pool:
            return pool.apply(abs, (-3,))
    return {"score": 1.0, "pid": os.getpid()}


def prints(solution_str: str, **given: Any) -> float:
    print(solution_str)
    return 1.0


value = 3.0
