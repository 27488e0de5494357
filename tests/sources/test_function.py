from __future__ import annotations

import asyncio
import functools
import logging
import os
import pickle
import signal
import subprocess
import sys
import threading
import time
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import numpy
import pytest

from qreward_plugins.errors import (
    ConfigurationError,
    InvalidReply,
    PermanentError,
    SampleFault,
    SampleRefused,
    SourceUnusable,
    Throttled,
    TransientError,
)
from qreward_plugins.samples import Sample
from qreward_plugins.sources import FunctionSource, Request, threads
from qreward_plugins.sources.worker_program import END_WITHIN_S
from qreward_plugins.system.functions import PathLoader

pytestmark = pytest.mark.anyio
FUNCTIONS = Path(__file__).parent / "scoring" / "functions.py"
PATIENCE_S = 30.0


def unheard() -> None:
    pass


def config(name: str, **settings: Any) -> FunctionSource.Config:
    return FunctionSource.Config(kind="function", function=f"{FUNCTIONS}:{name}", **{"workers": 1, **settings})


def request(response: str = "r", **fields: Any) -> Request:
    fields.setdefault("messages", [{"role": "user", "content": "q"}])
    return Request(sample=Sample(response=response, **fields))


@pytest.fixture
async def opened() -> AsyncIterator[Callable[..., FunctionSource]]:
    sources: list[FunctionSource] = []

    def make(name: str, **settings: Any) -> FunctionSource:
        sources.append(FunctionSource("f", config(name, **settings)))
        return sources[-1]

    yield make
    for source in sources:
        await source.aclose()


async def value(source: FunctionSource, asked: Request) -> Any:
    reply = await asyncio.wait_for(source.send(asked, on_sent=unheard), PATIENCE_S)
    return reply.value


async def until(check: Callable[[], Any]) -> Any:
    """Wait for something that another process does, and return what `check` makes of it."""
    deadline = asyncio.get_running_loop().time() + PATIENCE_S
    while not (found := check()):
        assert asyncio.get_running_loop().time() < deadline
        await asyncio.sleep(0.005)
    return found


def written(path: Path) -> str:
    return path.read_text() if path.exists() else ""


def is_gone(pid: int) -> bool:
    stat = Path(f"/proc/{pid}/stat")
    # A zombie is dead too: nobody hurries to reap what a killed worker leaves behind.
    return not stat.exists() or stat.read_text().rpartition(")")[2].split()[0] == "Z"


@pytest.mark.parametrize("mode", ["auto", "process", "thread"])
async def test_a_sync_function_gets_the_fields(mode: str, opened: Any) -> None:
    source = opened("fields", mode=mode, kwargs={"bonus": 2.0})
    sent: list[int] = []
    asked = request("text", data_source="math", ground_truth="42", extras={"level": 5})
    reply = await source.send(asked, on_sent=lambda: sent.append(1))
    assert sent == [1]
    assert reply.value["score"] == 3.0
    assert reply.value["given"] == ["math", "text", "42", {"level": 5}]
    assert (reply.value["pid"] == os.getpid()) == (mode == "thread")
    assert source.model == f"{FUNCTIONS}:fields"
    assert source.slots == 1


@pytest.mark.parametrize("mode", ["process", "thread"])
async def test_a_sync_function_gets_the_sample(mode: str, opened: Any) -> None:
    asked = request("text", ground_truth=[1, 2], group_id="g", step=3, split="train", id="i")
    given, bonus = await value(opened("of_sample", mode=mode, arguments="sample", kwargs={"bonus": 1.0}), asked)
    assert given == asked.sample
    assert bonus == 1.0


async def test_a_sample_pickles() -> None:
    sample = request("text", extras={"a": numpy.arange(3)}, ground_truth=numpy.float32(2)).sample
    copy = pickle.loads(pickle.dumps(sample))
    assert (copy.response, copy.ground_truth, copy.extras["a"].tolist()) == ("text", 2.0, [0, 1, 2])


@pytest.mark.parametrize("mode", ["process", "thread"])
async def test_arrays_and_tensors_arrive(mode: str, opened: Any) -> None:
    source = opened("types", mode=mode)
    assert await value(source, request(ground_truth=numpy.array([1.0, 2.0]))) == ["numpy", 3.0]
    torch = pytest.importorskip("torch")
    assert await value(source, request(ground_truth=torch.tensor([1.0, 2.5]))) == ["torch", 3.5]


@pytest.mark.parametrize(("name", "score"), [("awaited_object", 0.25), ("awaited_object.method", 0.75)])
async def test_async_functions_of_every_kind_are_awaited(name: str, score: float, opened: Any) -> None:
    source = opened(name)
    assert source.slots is None
    assert await value(source, request()) == score


async def test_an_async_function_and_its_failures(opened: Any) -> None:
    source = opened("awaited")
    assert await value(source, request()) == {"score": 0.5}
    with pytest.raises(PermanentError, match=r"raised ValueError: bad sample \(.*functions.py:\d+\)"):
        await value(source, request("raise"))
    with pytest.raises(PermanentError, match="raised SystemExit: 3"):
        await value(source, request("exit"))
    with pytest.raises(TransientError, match="TimeoutError"):
        await value(source, request("late"))
    with pytest.raises(Throttled) as caught:
        await value(source, request("throttled"))
    assert caught.value.retry_after_s == 2.0


async def test_a_partial_of_an_async_function_is_awaited() -> None:
    loader = functools.partial(functools.partial, PathLoader(f"{FUNCTIONS}:awaited")(), extra="x")
    source = FunctionSource("f", config("awaited"), loader=loader)
    assert await value(source, request()) == {"score": 0.5}
    await source.aclose()


@pytest.mark.parametrize("mode", ["process", "thread"])
@pytest.mark.parametrize(
    ("response", "kind", "says"),
    [
        ("raise", SampleRefused, r"raised ValueError: bad \\x1b sample \(.*functions.py:\d+\)"),
        ("strange", SampleRefused, "raised Strange: a"),
        ("stop", SampleRefused, "raised StopIteration"),
        ("exit", SampleRefused, "raised SystemExit: 3"),
        ("late", TransientError, "raised TimeoutError: too late"),
        ("lost", TransientError, "raised ConnectionResetError: lost"),
        ("coroutine", SampleRefused, "returned a coroutine"),
        ("throttled", Throttled, "wait"),
        ("invalid", InvalidReply, "no"),
    ],
)
async def test_what_a_function_raises(mode: str, response: str, kind: type, says: str, opened: Any) -> None:
    source = opened("misbehave", mode=mode)
    with pytest.raises(kind, match=says) as caught:
        await value(source, request(response))
    assert type(caught.value) is kind
    assert (await value(source, request()))["score"] == 1.0


@pytest.mark.parametrize(
    ("response", "kind", "says"),
    [
        ("crash", SampleFault, r"worker process died \(exit status 7\)"),
        ("segfault", SampleFault, r"worker process died \(killed by signal 11\)"),
        ("lambda", SampleRefused, "of type function, cannot be pickled"),
        ("large", SampleRefused, "too large"),
    ],
)
async def test_a_worker_that_is_lost_is_replaced(response: str, kind: type, says: str, opened: Any) -> None:
    source = opened("misbehave")
    with pytest.raises(kind, match=says) as caught:
        await value(source, request(response))
    assert type(caught.value) is kind
    assert (await value(source, request()))["score"] == 1.0


async def test_arguments_that_do_not_pickle(opened: Any) -> None:
    source = opened("fields")
    with pytest.raises(SampleRefused, match="ground_truth cannot be pickled for a worker"):
        await value(source, request(ground_truth=lambda: None))
    assert (await value(source, request()))["score"] == 1.0


async def test_a_call_that_takes_too_long_is_killed_with_all_that_it_started(opened: Any, tmp_path: Path) -> None:
    source = opened("misbehave", timeouts={"total_s": 0.5})
    await value(source, request())
    started = tmp_path / "started"
    with pytest.raises(SampleFault, match=r"killed after 0.5 s"):
        await value(source, request("family", extras={"started": str(started)}))
    pids = started.read_text().split()
    assert len(pids) == 2
    for pid in pids:
        await until(functools.partial(is_gone, int(pid)))
    assert (await value(source, request()))["score"] == 1.0


async def test_cancelling_kills_the_call_and_frees_its_slot(opened: Any, tmp_path: Path) -> None:
    source = opened("misbehave")
    for number in range(3):
        started = tmp_path / str(number)
        task = asyncio.create_task(
            source.send(request("hang", extras={"started": str(started)}), on_sent=unheard),
        )
        pid = int(await until(functools.partial(written, started)))
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        await until(functools.partial(is_gone, pid))
    assert (await value(source, request()))["score"] == 1.0


async def test_a_call_cancelled_before_it_started_starts_nothing_and_loses_no_worker(opened: Any) -> None:
    source = opened("misbehave")
    sent: list[int] = []
    tasks = [asyncio.create_task(source.send(request(), on_sent=lambda: sent.append(1))) for _ in range(4)]
    await asyncio.sleep(0)
    for task in tasks[:3]:
        task.cancel()
    reply = await asyncio.wait_for(tasks[3], PATIENCE_S)
    assert sent == [1]
    assert [task.cancelled() for task in tasks[:3]] == [True] * 3
    assert await value(source, request()) == reply.value


async def test_workers_are_shared_and_never_more_than_told(opened: Any) -> None:
    source = opened("misbehave", workers=2)
    replies = await asyncio.gather(*(value(source, request()) for _ in range(50)))
    pids = {reply["pid"] for reply in replies}
    assert 1 <= len(pids) <= 2
    assert pids <= source._pool.pids


async def test_a_hundred_calls_of_which_many_are_cancelled_leak_nothing(opened: Any) -> None:
    source = opened("misbehave", workers=2)

    async def one(number: int) -> str:
        task = asyncio.create_task(source.send(request(), on_sent=unheard))
        if number % 3 == 0:
            for _ in range(number):
                await asyncio.sleep(0)
            task.cancel()
        try:
            return "scored" if (await task).value["score"] == 1.0 else "?"
        except asyncio.CancelledError:
            return "cancelled"

    results = await asyncio.wait_for(asyncio.gather(*(one(number) for number in range(100))), PATIENCE_S)
    assert results.count("scored") >= 66
    assert len(source._pool.pids) <= 2
    pids = source._pool.pids
    await source.aclose()
    assert source._pool.pids == frozenset()
    for pid in pids:
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)


async def test_closing_ends_workers_that_hang_and_fails_their_calls(opened: Any, tmp_path: Path) -> None:
    source = opened("misbehave", workers=2)
    await value(source, request())
    started = tmp_path / "started"
    task = asyncio.create_task(source.send(request("hang", extras={"started": str(started)}), on_sent=unheard))
    pid = int(await until(functools.partial(written, started)))
    await asyncio.wait_for(source.aclose(), PATIENCE_S)
    with pytest.raises(TransientError):
        await task
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)
    with pytest.raises(SourceUnusable, match="closed"):
        await value(source, request())
    await source.aclose()


async def test_closing_while_a_worker_starts(opened: Any) -> None:
    source = opened("misbehave")
    task = asyncio.create_task(source.send(request(), on_sent=unheard))
    await asyncio.sleep(0)
    await asyncio.wait_for(source.aclose(), PATIENCE_S)
    with pytest.raises(SourceUnusable, match="closed"):
        await task


async def test_ctrl_c_is_for_the_parent(opened: Any) -> None:
    source = opened("misbehave")
    assert await value(source, request("interrupt")) == (await value(source, request()))["pid"]


async def test_a_function_may_use_processes_of_its_own(opened: Any) -> None:
    assert await value(opened("misbehave"), request("fork")) == 3


async def test_what_a_function_prints_goes_where_the_trainer_prints(capfd: Any, opened: Any) -> None:
    source = opened("prints")
    assert await value(source, request("hello")) == 1.0
    assert capfd.readouterr().out == "hello\n"


async def test_a_loader_takes_the_place_of_the_path() -> None:
    loader = functools.partial(PathLoader, f"{FUNCTIONS}:fields")()
    source = FunctionSource(
        "f", FunctionSource.Config(kind="function", function="verl:default", workers=1), loader=loader
    )
    assert (await value(source, request()))["score"] == 1.0
    assert source.model == "verl:default"
    await source.aclose()


def test_a_loader_that_does_not_pickle_is_a_mistake() -> None:
    with pytest.raises(ConfigurationError, match="cannot be pickled"):
        FunctionSource("f", config("fields"), loader=lambda: abs)


async def test_a_function_that_loads_here_but_not_in_a_worker(tmp_path: Path) -> None:
    path = tmp_path / "picky.py"
    path.write_text(
        "import os\nif os.getpid() != int(os.environ['QREWARD_TEST_PID']): raise ValueError('elsewhere')\n"
        "def score(**given): return 1.0\n"
    )
    os.environ["QREWARD_TEST_PID"] = str(os.getpid())
    source = FunctionSource("f", FunctionSource.Config(kind="function", function=f"{path}:score", workers=1))
    with pytest.raises(SourceUnusable, match="cannot be loaded in a worker process: ValueError: elsewhere"):
        await value(source, request())
    await source.aclose()
    del os.environ["QREWARD_TEST_PID"]


async def test_no_process_can_be_started(opened: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*args: Any, **kwargs: Any) -> Any:
        raise OSError(11, "Resource temporarily unavailable")

    source = opened("misbehave")
    monkeypatch.setattr(subprocess, "Popen", fail)
    with pytest.raises(TransientError, match="no worker process can be started"):
        await value(source, request())
    monkeypatch.undo()
    assert (await value(source, request()))["score"] == 1.0


def test_two_event_loops_one_after_the_other() -> None:
    source = FunctionSource("f", config("misbehave", workers=2))

    async def use() -> int:
        replies = await asyncio.gather(*(value(source, request()) for _ in range(6)))
        return len(replies)

    assert asyncio.run(use()) == 6
    first = source._pool.pids  # type: ignore[union-attr]
    assert asyncio.run(use()) == 6
    assert first & source._pool.pids  # type: ignore[union-attr]
    asyncio.run(source.aclose())


PARENT = """
import asyncio, sys
from qreward_plugins.samples import Sample
from qreward_plugins.sources import FunctionSource, Request

async def main(function, response, started):
    source = FunctionSource("f", FunctionSource.Config(kind="function", function=function, workers=1))
    sample = Sample(messages=[], response=response, extras={"started": started})
    await source.send(Request(sample=sample), on_sent=lambda: None)
    print([*source._pool.pids][0], flush=True)

asyncio.run(main(*sys.argv[1:]))
"""


async def test_a_parent_that_is_killed_leaves_no_worker_behind(tmp_path: Path) -> None:
    started = tmp_path / "started"
    command = [sys.executable, "-c", PARENT, f"{FUNCTIONS}:misbehave", "hang", str(started)]
    parent = await asyncio.create_subprocess_exec(*command, cwd=Path(__file__).parents[2])
    pid = int(await until(functools.partial(written, started)))
    parent.send_signal(signal.SIGKILL)
    killed_at = time.monotonic()
    await parent.wait()
    await until(functools.partial(is_gone, pid))
    assert time.monotonic() - killed_at < END_WITHIN_S  # others are soon given its concurrency


def test_a_parent_that_forgets_to_close_ends_cleanly(tmp_path: Path) -> None:
    command = [sys.executable, "-W", "error", "-c", PARENT, f"{FUNCTIONS}:misbehave", "fine", str(tmp_path)]
    ended = subprocess.run(command, cwd=Path(__file__).parents[2], capture_output=True, text=True, timeout=PATIENCE_S)
    assert (ended.returncode, ended.stderr) == (0, "")
    asyncio.run(until(functools.partial(is_gone, int(ended.stdout))))


class Gate:
    """A function for threads that waits until it is let go."""

    def __init__(self) -> None:
        self.entered = threading.Semaphore(0)
        self.opened = threading.Event()

    def __call__(self, **given: Any) -> float:
        self.entered.release()
        assert self.opened.wait(PATIENCE_S)
        return 1.0


def in_threads(gate: Gate, workers: int = 1) -> FunctionSource:
    return FunctionSource("f", config("fields", mode="thread", workers=workers), loader=lambda: gate)


async def entered(gate: Gate) -> None:
    assert await asyncio.to_thread(gate.entered.acquire, timeout=PATIENCE_S)


async def test_no_more_threads_than_told() -> None:
    gate = Gate()
    source = in_threads(gate, workers=2)
    sent: list[int] = []
    tasks = [asyncio.create_task(source.send(request(), on_sent=lambda: sent.append(1))) for _ in range(5)]
    for _ in range(2):
        await entered(gate)
    assert len(sent) == 2
    gate.opened.set()
    assert [(await task).value for task in tasks] == [1.0] * 5
    assert len(sent) == 5
    await source.aclose()


async def test_a_hanging_thread_gives_its_slot_back_and_there_is_a_limit(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(threads, "_MOST_ABANDONED", 4)
    gate = Gate()
    source = in_threads(gate)
    caplog.set_level(logging.WARNING)
    for _ in range(4):
        task = asyncio.create_task(source.send(request(), on_sent=unheard))
        await entered(gate)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
    assert source._threads is not None
    assert source._threads.abandoned == 4
    assert "cannot be killed" in caplog.text
    with pytest.raises(TransientError, match="4 abandoned calls still run"):
        await value(source, request())
    gate.opened.set()
    await source.aclose()
    assert source._threads.abandoned == 0


async def test_a_thread_that_ends_after_its_loop_is_harmless() -> None:
    gate = Gate()

    def run_and_leave() -> None:
        async def use() -> None:
            source = in_threads(gate)
            task = asyncio.create_task(source.send(request(), on_sent=unheard))
            await entered(gate)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task

        asyncio.run(use())

    await asyncio.to_thread(run_and_leave)
    gate.opened.set()
    for thread in threading.enumerate():
        if thread.name == "qreward-f":
            await asyncio.to_thread(thread.join, PATIENCE_S)
            assert not thread.is_alive()


@pytest.mark.parametrize("mode", ["process", "thread"])
async def test_a_function_of_another_signature_is_told_what_it_is_called_with(mode: str, tmp_path: Path) -> None:
    path = tmp_path / "rewards.py"
    path.write_text("def score(solution): return 1.0\n")
    source = FunctionSource("f", FunctionSource.Config(kind="function", function=f"{path}:score", mode=mode))
    try:
        with pytest.raises(
            SampleRefused, match="called with data_source, solution_str, ground_truth, extra_info"
        ) as caught:
            await value(source, request())
    finally:
        await source.aclose()
    assert "arguments: sample" in str(caught.value)
    assert "worker_program" not in str(caught.value)


async def test_a_type_error_of_its_own_is_not_blamed_on_the_signature(tmp_path: Path) -> None:
    path = tmp_path / "rewards.py"
    path.write_text("def score(data_source, solution_str, ground_truth, extra_info=None): return 1 + 'a'\n")
    source = FunctionSource("f", FunctionSource.Config(kind="function", function=f"{path}:score"))
    try:
        with pytest.raises(SampleRefused, match=r"TypeError: .*rewards\.py:1\)$"):
            await value(source, request())
    finally:
        await source.aclose()
