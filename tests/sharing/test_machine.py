"""Limits that processes of one machine share without Ray: real processes, one strict judge server, and every way to
lose the keeper.
"""

from __future__ import annotations

import asyncio
import json
import os
import queue
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

import pytest

from qreward_plugins.sharing.keeper import TTL_S
from qreward_plugins.sharing.machine_channel import MachineChannel
from qreward_plugins.sharing.messages import Report
from qreward_plugins.testing import JudgeServer, ServerLimits

PER_WINDOW, WINDOW_S = 60, 1.0
SLACK_S = 0.5
"""By how much the engines' window is longer than the server's, which may get no processor for a while."""
LONG_S = 90.0
WORKER = Path(__file__).with_name("machine_worker.py")


@pytest.fixture
def directory():
    """A private directory with a path that is short enough for a socket."""
    made = tempfile.mkdtemp(prefix="qr")
    yield made
    shutil.rmtree(made, ignore_errors=True)


@pytest.fixture
def server():
    with JudgeServer(limits=ServerLimits(requests_per_minute=PER_WINDOW * 60 / WINDOW_S, window_s=WINDOW_S)) as server:
        yield server


def tree(base_url, **engine):
    window_s = WINDOW_S + SLACK_S
    limits = {"requests_per_minute": PER_WINDOW * 60 / window_s, "window_s": window_s, "window": "sliding"}
    return {
        "sources": {"a": {"kind": "openai", "base_url": base_url, "model": "judge", "limits": limits}},
        "judges": {"quality": {"kind": "llm", "score_range": [0, 1], "max_tokens": 64}},
        "engine": {"seed": 7, "scheduling": {"hedge": False}, **engine},
    }


class Process:
    """A process with an engine."""

    def __init__(self, tree):
        self._process = subprocess.Popen(
            [sys.executable, str(WORKER), json.dumps(tree)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        self.pid = self._process.pid
        self._lines = queue.Queue()
        threading.Thread(target=self._read, daemon=True).start()

    def say(self, *words):
        print(*words, file=self._process.stdin, flush=True)

    def hear(self):
        return json.loads(self._lines.get(timeout=LONG_S))

    def ask(self, *words):
        self.say(*words)
        return self.hear()

    def signal(self, number):
        os.kill(self.pid, number)

    def end(self):
        if self._process.poll() is None:
            self._process.kill()
        self._process.wait()
        self._process.stdin.close()
        self._process.stdout.close()

    def _read(self):
        for line in self._process.stdout:
            self._lines.put(line)


@pytest.fixture
def start():
    started = []

    def start(count, tree):
        these = [Process(tree) for _ in range(count)]
        started.extend(these)
        assert [process.hear()["pid"] for process in these] == [process.pid for process in these]
        return these

    yield start
    for each in started:
        each.end()


def comes(what, within_s=LONG_S):
    ends_at = time.monotonic() + within_s
    while not what():
        assert time.monotonic() < ends_at, "it did not come"
        time.sleep(0.02)


def keeper_of(processes):
    """Return the process that keeps the limits, once all processes name it. On a busy machine, a keeper that was silent
    for a while has just been replaced, and its workers hear of it one after the other."""
    found = []

    def agreed():
        for process in processes:
            process.say("stats")
        kept_by = [process.hear()["kept_by"] for process in processes]
        found[:] = [process for process, by in zip(processes, kept_by, strict=True) if by == "this process"]
        others = {by for by in kept_by if by != "this process"}
        return len(found) == 1 and others == {f"process {found[0].pid} of this machine"}

    comes(agreed)
    return found[0]


def longest_pause_s(server, until):
    """Return the longest time in seconds in which no request came to a server, until something is so."""
    longest_s, seen, last_at = 0.0, server.report().requests, time.monotonic()

    def is_so():
        nonlocal longest_s, seen, last_at
        requests, now = server.report().requests, time.monotonic()
        longest_s = max(longest_s, now - last_at)
        if requests != seen:
            seen, last_at = requests, now
        return until()

    comes(is_so)
    return longest_s


def test_a_keeper_that_is_killed_in_the_middle_is_replaced_and_no_limit_is_broken(directory, server, start):
    """The killed process holds the whole limit, and the others wait no longer than what it may have sent counts."""
    config = tree(server.base_url, shared="machine", shared_directory=directory)
    # The one that comes later takes no part until it is told to: a process takes a second to start.
    *processes, heir = start(4, config)
    keeper, *others = processes
    keeper.say("score", 0, 150)
    comes(lambda: server.report().requests >= PER_WINDOW)
    for number, process in enumerate(others, 1):
        process.say("score", 1000 * number, 75)
    assert keeper_of(processes) is keeper
    keeper.signal(signal.SIGKILL)
    sent = server.report().requests
    assert longest_pause_s(server, lambda: server.report().requests > sent + PER_WINDOW) < TTL_S
    # What the killed process had to score is scored by the one that replaces it.
    heir.say("score", 5000, 75)
    left = [*others, heir]
    assert [process.hear() for process in left] == [{"scored": 75, "problems": []}] * 3
    new = {process.ask("stats")["kept_by"] for process in left}
    assert "this process" in new
    assert f"process {keeper.pid} of this machine" not in new
    report = server.report()
    assert report.violations_total == 0, report.violations[:5]
    assert report.requests >= 225


def test_a_keeper_that_is_stopped_is_replaced_and_answers_nobody_when_it_comes_back(directory, server, start):
    config = tree(server.base_url, shared="machine", shared_directory=directory)
    (old,) = start(1, config)
    old.say("score", 0, 150)
    comes(lambda: server.report().requests >= PER_WINDOW)
    old.signal(signal.SIGSTOP)

    async def take_over():
        channel = MachineChannel(Path(directory))
        # An engine does this after 30 s without an answer.
        await channel.end_keeper()
        answer = await channel.exchange(Report("w", 1, {}))
        assert "this process" in channel.kept_by
        assert answer is not None
        old.signal(signal.SIGCONT)
        assert await asyncio.to_thread(old.hear) == {"scored": 150, "problems": []}
        told = await asyncio.to_thread(old.ask, "stats")
        assert told["kept_by"] == f"process {os.getpid()} of this machine"
        await channel.aclose()

    asyncio.run(take_over())
    report = server.report()
    assert report.violations_total == 0, report.violations[:5]


FORKS = """
import asyncio, os, sys, time
from pathlib import Path
from qreward_plugins.sharing.machine_channel import MachineChannel
from qreward_plugins.sharing.messages import Report

async def main():
    channel = MachineChannel(Path(sys.argv[1]))
    await channel.exchange(Report("w", 1, {}))
    child = os.fork()
    if not child:
        time.sleep(60)  # it has inherited the sockets and the lock
        os._exit(0)
    print(child, flush=True)
    time.sleep(60)

asyncio.run(main())
"""


def test_a_forked_child_does_not_hold_what_its_dead_parent_kept(directory):
    with subprocess.Popen(
        [sys.executable, "-W", "ignore", "-c", FORKS, directory], stdout=subprocess.PIPE, text=True
    ) as parent:
        child = int(parent.stdout.readline())
        parent.kill()

    async def take_over():
        channel = MachineChannel(Path(directory))
        answer = await channel.exchange(Report("w", 1, {}))
        assert answer is not None
        assert channel.kept_by == "this process"
        await channel.aclose()

    try:
        asyncio.run(take_over())
    finally:
        os.kill(child, signal.SIGKILL)


PREFORKED = """
import asyncio, json, os, sys
from qreward_plugins import RewardEngine

async def name():
    engine.dispatcher()
    print(engine._wiring.membership.member.name)
    await engine.aclose()

engine = RewardEngine(json.loads(sys.argv[1]))
for _ in range(2):
    if not os.fork():
        asyncio.run(name())
        sys.exit()
    os.wait()
asyncio.run(name())
"""


def test_processes_forked_from_one_that_made_the_engine_are_workers_of_their_own(directory):
    """As with `gunicorn --preload`: under one name, each would spend the share of all."""
    config = json.dumps(tree("http://localhost:9", shared="machine", shared_directory=directory))
    told = subprocess.run([sys.executable, "-c", PREFORKED, config], stdout=subprocess.PIPE, text=True, check=True)
    assert len(set(told.stdout.split())) == 3


def test_a_reload_of_one_process_is_one_of_all(directory, start, tmp_path):
    file = tmp_path / "judges.yaml"

    def write(deadline_s):
        config = tree("http://localhost:9", shared="machine", shared_directory=directory, reload=True)
        file.write_text(json.dumps(config | {"engine": {**config["engine"], "deadline_s": deadline_s}}))

    write(100)
    one, two = start(2, str(file))
    for process in (one, two):
        assert process.ask("deadline") == {"deadline_s": 100.0}
    write(200)
    assert one.ask("reload") == {"changes": "engine.deadline_s: 100 -> 200"}
    comes(lambda: two.ask("deadline") == {"deadline_s": 200.0})
    assert [process.ask("close") for process in (one, two)] == [{"closed": True}] * 2
