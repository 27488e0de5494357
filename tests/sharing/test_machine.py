"""Limits that the processes of one machine share without Ray: real processes, a strict server, and every way to lose
the keeper. No setting is needed.
"""

from __future__ import annotations

import asyncio
import bisect
import json
import os
import signal
import subprocess
import time
from contextlib import ExitStack, suppress
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest

from qreward_plugins import RewardEngine
from qreward_plugins.config import Limits
from qreward_plugins.errors import KeeperLost, KeeperSilent
from qreward_plugins.quotas.pauses import Breaker, Pauses
from qreward_plugins.quotas.quota import Reservation
from qreward_plugins.quotas.shared import SharedQuota
from qreward_plugins.sharing.machine_channel import VARIABLE, MachineChannel
from qreward_plugins.sharing.machine_keeper import IDLE_S, LOCK, LOOK_EVERY_S
from qreward_plugins.sharing.member import Demand, Member
from qreward_plugins.testing import JudgeServer, ServerLimits

from ..kit import Program, make_config, make_sample, wait_until

pytestmark = pytest.mark.anyio
PER_WINDOW, WINDOW_S = 60, 1.0
SLACK_S = 0.5
"""By how much the engines' window is longer than the server's, which may get no processor for a while."""
WORKERS = """
import asyncio, json, os, sys
from qreward_plugins import RewardEngine, Sample
from qreward_plugins.quotas.quota import Reservation

log = os.open(sys.argv.pop(1), os.O_WRONLY | os.O_CREAT | os.O_APPEND)
sent = Reservation.sent

def logged(self, now):
    os.write(log, f"{now!r} ".encode())
    sent(self, now)

Reservation.sent = logged

async def main(first, count):
    samples = [Sample([{"role": "user", "content": "Which?"}], f"It is {first + number}.") for number in range(count)]
    async with engine:
        outcomes = await engine.score_all(samples, deadline_s=100.0)
        problems = sorted({one.describe() for one in outcomes if one.reward is None})
        said = [len(outcomes), problems, engine.statistics().limits_kept_by, engine._lifetime.membership.member.name]
        print("scored " + json.dumps(said) + os.linesep, end="", flush=True)

engine = RewardEngine(json.loads(sys.argv[1]))
for number, count in enumerate(map(int, sys.argv[2:])):
    if not (pid := os.fork()):
        asyncio.run(main(1000 * number, count))
        os._exit(0)
    print("worker " + str(pid) + os.linesep, end="", flush=True)
sys.stdin.readline()
"""
"""Forks a worker for each number of samples, as `gunicorn --preload` does: the engine was made before. Each line is one
string: without a buffer, Python writes each argument of `print` by itself, and the workers share one output.
"""


@pytest.fixture
def server():
    with JudgeServer(limits=ServerLimits(requests_per_minute=PER_WINDOW * 60 / WINDOW_S, window_s=WINDOW_S)) as server:
        yield server


def declared(per_window=PER_WINDOW, window_s=WINDOW_S + SLACK_S):
    return {"requests_per_minute": per_window * 60 / window_s, "window_s": window_s, "window": "sliding"}


def tree(server, **engine):
    engine = {"scheduling": {"hedge": False}, **engine}
    return make_config({"a": server}, limits={"a": declared()}, engine=engine, judge={"max_tokens": 64})


@pytest.fixture
def written(tmp_path):
    """When requests were written, by all processes."""
    return tmp_path / "written"


@pytest.fixture
def start(server, written):
    with ExitStack() as stack:

        def start(*counts):
            """Start processes that score so many samples each, at once. Return their program and their numbers."""
            program = Program("-c", WORKERS, written, json.dumps(tree(server)), *counts, stdin=subprocess.PIPE)
            stack.enter_context(program)
            return program, [int(program.line("worker").split()[1]) for _ in counts]

        yield start


def results(program, count):
    """What so many workers scored, who keeps their limits, and how they are called."""
    found = [json.loads(program.line("scored").removeprefix("scored ")) for _ in range(count)]
    assert [problems for _, problems, _, _ in found] == [[]] * count
    assert len({name for _, _, _, name in found}) == count, "under one name, each would spend the share of all"
    return [scored for scored, _, _, _ in found], {kept_by for _, _, kept_by, _ in found}


def keeper():
    """The process that keeps the limits of this test, if there is one."""
    directory = os.environ[VARIABLE]
    of_it = [one for one in psutil.process_iter(["cmdline"]) if directory in (one.info["cmdline"] or [])]
    return next((one for one in of_it if one.ppid() != os.getpid()), None)


def kept(written):
    """Check what all processes have written, on the clock that they share. A server that gets no processor for a while
    reads requests closer together.
    """
    times = sorted(map(float, written.read_text().split()))
    window_s = WINDOW_S + SLACK_S
    assert max(bisect.bisect_left(times, at + window_s) - number for number, at in enumerate(times)) <= PER_WINDOW
    return len(times)


async def test_engines_of_one_process_keep_one_window_at_once_and_one_after_the_other(server, written, monkeypatch):
    sent = Reservation.sent

    def logged(self, now):
        with written.open("a") as log:
            log.write(f"{now!r} ")
        sent(self, now)

    monkeypatch.setattr(Reservation, "sent", logged)

    async def score(first):
        async with RewardEngine(tree(server)) as engine:
            outcomes = await engine.score_all(map(make_sample, range(first, first + 50)))
            assert all(outcome.reward is not None for outcome in outcomes)

    await asyncio.gather(score(0), score(100))
    await score(200)
    assert kept(written) >= 150


async def test_a_stream_keeps_a_source_busy_although_its_first_share_has_not_come(server):
    limits = {"a": {**declared(), "concurrency": 16}}
    async with RewardEngine(make_config({"a": server}, limits=limits)) as engine:
        assert engine.stream_window == 4 * 16


def test_processes_that_start_at_once_have_one_keeper_which_is_small_and_leaves_nothing(start, written):
    program, _ = start(40, 40, 40, 40)
    _, (kept_by,) = results(program, 4)
    assert kept(written) >= 160
    process = keeper()
    assert kept_by == f"process {process.pid} of this machine"
    assert process.name() == "qreward-keeper"
    assert process.memory_info().rss < 25 * 2**20
    process.wait(WINDOW_S + SLACK_S + IDLE_S + 2 * LOOK_EVERY_S + 5.0)
    assert os.listdir(os.environ[VARIABLE]) == []


def test_a_keeper_that_is_killed_in_the_middle_is_replaced_and_no_limit_is_broken(start, server, written):
    """Before that, a worker is killed, which takes nothing along."""
    program, (killed, *_) = start(300, 150, 150)
    wait_until(lambda: server.report().requests > PER_WINDOW)
    os.kill(killed, signal.SIGKILL)
    before = server.report().requests
    wait_until(lambda: server.report().requests > before + PER_WINDOW)
    old = keeper()
    old.kill()
    scored, kept_by = results(program, 2)
    assert scored == [150, 150]
    # On a busy machine, one of the two may have ended before the keeper was killed.
    assert len(kept_by - {f"process {old.pid} of this machine"}) == 1
    assert kept(written) >= 300


class Worker:
    """A worker without an engine."""

    def __init__(self, name):
        self.channel = MachineChannel()
        quota = SharedQuota(Limits(**declared()), source="s")
        limited = SimpleNamespace(quota=quota, breaker=Breaker(), pauses=Pauses(), live={})
        self.member = Member(name, {"s": limited})

    async def share(self):
        """Report that work waits, and return the share that comes of it."""
        now = asyncio.get_running_loop().time()
        while True:  # a busy machine may not start a process in time, and an engine asks again, too
            with suppress(KeeperSilent):
                answer = await self.channel.exchange(self.member.report(now, {"s": Demand(500)}))
                break
        assert self.member.accept(answer, now)
        return answer.sources["s"].grants["requests"].share

    async def leave(self):
        await self.channel.exchange(self.member.last_report(asyncio.get_running_loop().time()))
        await self.channel.aclose()


async def test_a_stopped_keeper_is_killed_and_the_next_one_gives_nothing_that_it_may_have_given():
    one, late = Worker("one"), Worker("late")
    assert await one.share() == PER_WINDOW
    old = keeper()
    os.kill(old.pid, signal.SIGSTOP)
    silent = asyncio.ensure_future(late.share())
    while not late.channel.kept_by:
        await asyncio.wait([silent], timeout=0.01)
    for _ in range(20):  # connected: now it sends its report, which nobody reads
        await asyncio.sleep(0)
    silent.cancel()
    await asyncio.gather(silent, return_exceptions=True)
    # An engine does this after 30 s without an answer.
    await late.channel.end_keeper()
    old.wait(10)
    with suppress(KeeperLost):  # unless it has seen the connection end already
        await one.share()
    # It reports what it holds, and the rest may be held by a worker that has not reported.
    assert [await late.share(), await one.share()] == [0.0, PER_WINDOW]
    assert keeper().pid != old.pid
    await one.leave()
    await late.leave()


@pytest.mark.parametrize(("ago_s", "share"), [(0, 0.0), (3600, PER_WINDOW)])
async def test_after_a_kill_the_next_keeper_gives_nothing_unless_that_was_long_ago(ago_s, share):
    """As after a restart of the machine: no run begins with 71 s of waiting."""
    one = Worker("one")
    await one.share()
    await one.channel.aclose()
    process = keeper()
    process.kill()
    process.wait(60)  # its socket may still be open
    died_at = time.time() - ago_s
    os.utime(Path(os.environ[VARIABLE]) / LOCK, (died_at, died_at))
    two = Worker("two")
    assert await two.share() == share
    await two.leave()
    if ago_s == 0:
        # It has to remember that until no share of the killed one counts any more, also without a user.
        await asyncio.sleep(IDLE_S + 3 * LOOK_EVERY_S)
        assert keeper() is not None


async def test_a_last_report_starts_no_keeper():
    await Worker("one").leave()
    assert not (Path(os.environ[VARIABLE]) / LOCK).exists()


async def test_a_keeper_whose_directory_is_removed_ends():
    one = Worker("one")
    await one.share()
    process = keeper()
    os.unlink(Path(os.environ[VARIABLE]) / LOCK)
    process.wait(10)
    await one.channel.aclose()
