"""The keeper of a machine within one process, over real sockets: who becomes it, what it leaves, and who is refused."""

from __future__ import annotations

import asyncio
import errno
import gc
import logging
import os
import shutil
import socket
import subprocess
import sys
import tempfile
import threading
from contextlib import suppress
from pathlib import Path

import pytest

from qreward_plugins import ConfigurationError, RewardEngine
from qreward_plugins.config import EngineConfig, Limits
from qreward_plugins.errors import KeeperSilent
from qreward_plugins.quotas.shared import SharedQuota
from qreward_plugins.server.limits import LimitsDoor
from qreward_plugins.sharing import (
    Demand,
    Member,
    channels,
    keeper,
    keeper_lock,
    machine_channel,
    machine_keeper,
    open_channel,
)
from qreward_plugins.sharing.keeper import MARGIN_S, TTL_S
from qreward_plugins.sharing.keeper_lock import STAMP_EVERY_S, KeeperLock, latest, socket_path
from qreward_plugins.sharing.machine_channel import MachineChannel
from qreward_plugins.sharing.messages import Report
from qreward_plugins.sharing.wire import dump, write_report
from qreward_plugins.sharing.worker_locks import not_dead, state

pytestmark = pytest.mark.anyio
LIMIT = 100


@pytest.fixture
def directory():
    """A private directory with a path that is short enough for a socket."""
    made = tempfile.mkdtemp(prefix="qr")
    yield Path(made)
    shutil.rmtree(made, ignore_errors=True)


@pytest.fixture(autouse=True)
def nothing_is_left():
    yield
    assert not [thread for thread in threading.enumerate() if thread.name == "qreward-keeper"]
    gc.collect()  # an open socket would be a ResourceWarning


@pytest.fixture(autouse=True)
def reports_are_held_shortly(monkeypatch):
    """A report that the keeper has nothing to say to is answered soon."""
    monkeypatch.setattr(keeper, "HOLD_S", 0.05)


class Worker:
    """A member and its channel."""

    def __init__(self, directory, name="w", source="a", window_s=60.0):
        self.source = source
        limits = Limits(requests_per_minute=LIMIT * 60 / window_s, window_s=window_s, window="sliding")
        self.quota = SharedQuota(limits, source=source)
        self.member = Member(name, {source: self.quota})
        self.channel = MachineChannel(directory)

    @property
    def share(self):
        return self.quota.share["requests"]

    async def ask(self, requests=LIMIT):
        now = asyncio.get_running_loop().time()
        answer = await self.channel.exchange(self.member.report(now, {self.source: Demand(requests)}, {}))
        if answer is not None:
            self.member.accept(answer, now)
        return answer

    def spend(self, count):
        now = asyncio.get_running_loop().time()
        for _ in range(count):
            assert self.quota.wait_s(0, now) == 0
            self.quota.reserve(0, 0, now).release(now)

    async def leave(self):
        last = self.member.last_report(asyncio.get_running_loop().time())
        assert await self.channel.exchange(last) is None
        await self.channel.aclose()


async def test_the_first_one_keeps_and_the_last_one_takes_it_away(directory):
    one, other = Worker(directory, "one"), Worker(directory, "other")
    answer = await one.ask()
    assert one.share == LIMIT
    assert one.channel.kept_by == "this process"
    assert (await other.ask(1)).boot == answer.boot
    await one.leave()
    assert latest(directory) == 1
    await other.ask()
    await other.leave()
    assert not socket_path(directory, 1).exists()


async def test_what_one_run_spent_counts_in_the_next(directory):
    first = Worker(directory, "first")
    await first.ask()
    first.spend(60)
    await first.leave()
    second = Worker(directory, "second")
    await second.ask()
    assert second.share == LIMIT - 60
    await second.leave()


async def test_without_a_word_of_the_last_keeper_everything_counts_as_spent_for_a_while(directory):
    first = Worker(directory, "first")
    await first.ask()
    await first.leave()
    (directory / "keeper.state").unlink()
    second = Worker(directory, "second")
    await second.ask()
    assert second.share == 0
    await second.leave()


async def test_the_state_of_an_earlier_keeper_is_not_taken_for_that_of_the_last(directory):
    for name in ("first", "second"):
        worker = Worker(directory, name)
        await worker.ask()
        await worker.leave()
        if name == "first":
            shutil.copy(directory / "keeper.state", directory / "old")
    shutil.copy(directory / "old", directory / "keeper.state")
    third = Worker(directory, "third")
    await third.ask()
    assert third.share == 0
    await third.leave()


async def test_what_a_dead_keeper_gave_counts_also_after_one_that_knew_nothing_of_it(directory):
    """The second keeper ends in order, but nobody has told it of the source."""
    first = Worker(directory, "first")
    await first.ask()
    first.spend(60)
    await first.leave()
    (directory / "keeper.state").unlink()  # as after a kill
    for name in ("second", "third"):
        other = Worker(directory, name, source="b")
        await other.ask()
        await other.leave()
    last = Worker(directory, "last")
    await last.ask()
    assert last.share == 0
    await last.leave()


async def test_a_full_disk_costs_time_and_breaks_nothing(directory, monkeypatch):
    def full(*_):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(keeper_lock.os, "pwrite", full)
    monkeypatch.setattr(keeper_lock.os, "replace", full)
    first = Worker(directory, "first")
    await first.ask()
    assert first.share == LIMIT  # it can be seen that nobody was here before
    await first.leave()
    second = Worker(directory, "second")
    await second.ask()
    assert second.share == 0  # and that somebody was
    await second.leave()


async def test_files_of_dead_processes_are_in_nobody_s_way(directory):
    stale = socket.socket(socket.AF_UNIX)
    stale.bind(os.fspath(socket_path(directory, 1)))
    stale.close()
    (directory / "keeper.1.lock").touch()
    (directory / "keeper.state.part").write_text("{")
    (directory / "keeper.99999999999.lock").touch()  # not one of ours
    worker = Worker(directory)
    await worker.ask()
    assert worker.share == LIMIT
    await worker.leave()


TAKES_ALL = """
import asyncio, sys, time
sys.path.insert(0, sys.argv[2])
from pathlib import Path
from test_machine_channel import Worker

async def main():
    worker = Worker(Path(sys.argv[1]), "killed", window_s=1.0)
    await worker.ask()
    print(worker.share, flush=True)
    await asyncio.sleep(600)

asyncio.run(main())
"""


@pytest.fixture
def one_that_takes_all(directory):
    """Return a function that starts a process which holds the whole limit. It is asked at the end only how it ended, so
    a killed one is a zombie until then."""
    started = []

    def start():
        script = [sys.executable, "-c", TAKES_ALL, os.fspath(directory), os.fspath(Path(__file__).parent)]
        process = subprocess.Popen(script, stdout=subprocess.PIPE, text=True)
        started.append(process)
        assert float(process.stdout.readline()) == LIMIT
        return process

    yield start
    for process in started:
        process.kill()
        process.communicate()


async def gets_all(worker):
    """Return after how many seconds a worker has the whole limit."""
    loop = asyncio.get_running_loop()
    began_at = loop.time()
    while worker.share < LIMIT:
        await worker.ask()
        assert loop.time() - began_at < 60.0
    return loop.time() - began_at


async def test_a_killed_worker_s_share_counts_for_a_window_and_not_until_it_would_expire(directory, one_that_takes_all):
    keeps, worker = Worker(directory, "keeps", source="b"), Worker(directory, window_s=1.0)
    await keeps.ask()
    killed = one_that_takes_all()
    await worker.ask(1)
    assert (worker.share, worker.channel.kept_by) == (0, "this process")
    killed.kill()
    assert 0.9 <= await gets_all(worker) < TTL_S
    await worker.leave()
    await keeps.leave()


async def test_after_a_killed_keeper_all_are_heard_and_the_rest_counts_for_a_window(directory, one_that_takes_all):
    killed = one_that_takes_all()
    worker = Worker(directory, window_s=1.0)
    await worker.ask(1)
    assert (worker.share, worker.channel.kept_by) == (0, f"process {killed.pid} of this machine")
    killed.kill()
    assert 0.9 <= await gets_all(worker) < TTL_S
    assert worker.channel.kept_by == "this process"
    await worker.leave()


@pytest.mark.parametrize("lost", ["the worker's file", "the worker's file, of which no keeper knew"])
async def test_a_worker_without_a_file_is_waited_for(directory, lost, monkeypatch):
    """The other one lives, and may spend its share until it expires."""
    other = Worker(directory, "other", window_s=1.0)
    with monkeypatch.context() as patched:
        if "no keeper" in lost:
            patched.setattr(machine_channel.WorkerLock, "hold", no_space)
        await other.ask()
    assert other.share == LIMIT
    if "no keeper" not in lost:
        (directory / "workers" / "other.lock").unlink()
        other.channel._connection._end()
        await other.ask()  # with a new connection it makes its file anew
    worker = Worker(directory, "worker", window_s=1.0)
    await worker.channel.end_keeper()
    await worker.ask()
    assert latest(directory) == 2
    await asyncio.sleep(1.5)
    await worker.ask()
    assert worker.share == 0
    await other.ask()
    assert other.share == LIMIT
    await other.leave()
    await worker.leave()


async def test_a_worker_without_a_file_is_waited_for_also_after_a_keeper_that_ended_in_order(directory, monkeypatch):
    """The second keeper knows what the other one holds, and the third one does not."""
    other = Worker(directory, "other", window_s=1.0)
    with monkeypatch.context() as patched:
        patched.setattr(machine_channel.WorkerLock, "hold", no_space)
        await other.ask()
    assert other.share == LIMIT
    (first,) = machine_channel._kept[directory]
    first.end()
    worker = Worker(directory, "worker", window_s=1.0)
    await worker.ask()
    await worker.channel.end_keeper()
    await worker.ask()
    assert latest(directory) == 2
    await asyncio.sleep(1.5)
    await worker.ask()
    assert (worker.share, other.share) == (0, LIMIT)
    await worker.leave()
    await other.leave()


async def test_a_file_that_is_removed_while_its_worker_is_connected_is_missed(directory):
    """Else the next keeper would not wait for the worker, which lives and may spend its share."""
    other, worker = Worker(directory, "other", window_s=1.0), Worker(directory, "worker", window_s=1.0)
    await other.ask()
    (directory / "workers" / "other.lock").unlink()
    await worker.ask()
    await asyncio.sleep(1.5 * STAMP_EVERY_S)
    await worker.channel.end_keeper()
    await worker.ask()
    assert latest(directory) == 2
    await asyncio.sleep(1.5)
    await worker.ask()
    assert (worker.share, other.share) == (0, LIMIT)
    await worker.leave()
    await other.leave()


async def test_a_lock_is_held_until_there_is_another_one(directory, monkeypatch):
    """A file that is in place and not locked would prove that the worker is dead."""
    worker = Worker(directory)
    await worker.ask()
    with monkeypatch.context() as patch:
        patch.setattr(machine_channel.WorkerLock, "refresh", lambda self: False)
        patch.setattr(machine_channel.WorkerLock, "hold", no_space)
        worker.channel._connection._end()
        await worker.ask()
    assert state(directory, "w") == "alive"
    await worker.leave()


def no_space(*_):
    raise OSError(errno.ENOSPC, "No space left on device")


async def test_a_relaying_process_proves_nothing_of_the_workers_whose_reports_it_relays(directory):
    """A reward server may be killed while they live, and their shares are valid for a while."""
    door = LimitsDoor(EngineConfig(shared="machine", shared_directory=str(directory)))
    await door.answer(dump({"report": write_report(Report("far", 1, {}))}))
    near = Worker(directory, "near")
    await near.ask()
    assert not_dead(directory) == {"near"}
    await near.leave()
    await door.aclose()


async def test_relayed_workers_that_never_leave_are_forgotten(directory, monkeypatch):
    monkeypatch.setitem(keeper.Keeper.__init__.__kwdefaults__, "ttl_s", 0.1)
    monkeypatch.setattr(keeper, "MARGIN_S", 0.1)
    door = LimitsDoor(EngineConfig(shared="machine", shared_directory=str(directory)))
    near = Worker(directory, "near")
    for number in range(5):
        await door.answer(dump({"report": write_report(Report(f"far {number}", 1, {}))}))
    (running,) = machine_channel._kept[directory]
    ends_at = asyncio.get_running_loop().time() + 10 * STAMP_EVERY_S
    while set(running._connections) != {"near"}:
        await near.ask()
        assert asyncio.get_running_loop().time() < ends_at
    await near.leave()
    await door.aclose()


async def test_a_worker_that_leaves_lets_go_of_its_lock_though_its_channel_stays_open(directory):
    first, second = Worker(directory, "first"), Worker(directory, "second")
    second.channel = first.channel
    await first.ask()
    await second.ask()
    assert not_dead(directory) == {"first", "second"}
    await first.channel.exchange(first.member.last_report(asyncio.get_running_loop().time()))
    assert not_dead(directory) == {"second"}
    await second.leave()


async def test_however_many_begin_at_once_there_is_one_keeper(directory):
    workers = [Worker(directory, str(number)) for number in range(20)]
    answers = await asyncio.gather(*(worker.ask(1) for worker in workers))
    assert len({answer.boot for answer in answers}) == 1
    for worker in workers:
        await worker.leave()


async def test_a_keeper_that_was_replaced_answers_nobody(directory):
    old, new = Worker(directory, "old"), Worker(directory, "new")
    before = await old.ask()
    await new.channel.end_keeper()
    after = await new.ask()
    assert after.boot != before.boot
    assert new.share == 0  # the other one may still spend all
    assert (latest(directory), (directory / "keeper.1.lock").exists()) == (2, False)
    assert (await old.ask()).boot == after.boot
    assert old.share == LIMIT  # what it says that it holds
    await old.leave()
    await new.leave()


async def test_a_directory_that_is_removed_ends_the_keeper_and_the_next_one_believes_nothing(directory):
    worker = Worker(directory)
    before = await worker.ask()
    worker.spend(LIMIT)
    shutil.rmtree(directory)
    after = await worker.ask()
    if after is None or after.boot == before.boot:  # it answered before it looked
        after = await worker.ask()
    assert after.boot != before.boot
    other = Worker(directory, "other")
    await other.ask()
    assert other.share == 0
    await worker.leave()
    await other.leave()


async def test_a_peer_that_sends_anything_ends_only_its_own_connection(directory, caplog):
    worker, loop = Worker(directory), asyncio.get_running_loop()
    before = await worker.ask()
    path = os.fspath(socket_path(directory, 1))
    cases = [
        b"GET / HTTP/1.1\r\n\r\n" + b"x" * 100,
        b"\x7f\xff\xff\xff",
        b"\x00\x00\x00\x00",
        b"\x00\x00\x00\x02[]",
        b"\x00\x00\x00\x02{}",
        b'\x00\x00\x00\x0d{"report": 1}',
        b"\x00\x00",
    ]
    with caplog.at_level(logging.WARNING, "qreward_plugins.sharing"):
        for data in cases:
            with socket.socket(socket.AF_UNIX) as peer:
                peer.setblocking(False)
                await loop.sock_connect(peer, path)
                assert await loop.sock_recv(peer, 1000)  # it says who it is
                await loop.sock_sendall(peer, data)
                if len(data) > 2:
                    with suppress(ConnectionResetError):
                        assert await loop.sock_recv(peer, 1000) == b""
    assert (await worker.ask()).boot == before.boot
    assert any("unreadable" in record.message for record in caplog.records)
    await worker.leave()


async def test_a_process_of_another_user_is_not_heard(directory, monkeypatch):
    monkeypatch.setattr(machine_keeper, "is_own_user", lambda peer: False)
    monkeypatch.setattr(machine_channel, "CONNECT_WITHIN_S", 0.3)
    worker = Worker(directory)
    with pytest.raises(KeeperSilent):
        await worker.ask()
    await worker.channel.aclose()


def test_a_channel_goes_on_in_the_next_event_loop(directory):
    worker = Worker(directory)
    boots = [asyncio.run(worker.ask()).boot for _ in range(2)]
    assert boots[0] == boots[1]
    asyncio.run(worker.leave())


async def test_who_keeps_is_told_without_taking_part(directory):
    channel = MachineChannel(directory)
    assert "nobody yet" in await channel.describe()
    worker = Worker(directory)
    await worker.ask()
    assert await channel.describe() == f"kept by process {os.getpid()} in {directory}, for 1 engines now"
    await worker.leave()
    await channel.aclose()


# The lock


def test_one_holds_the_lock_and_what_is_known_of_it_afterwards(directory):
    held = KeeperLock.lock(directory, 1)
    assert held is not None
    assert held.inherit(100.0, met=False) == (True, None, None, True)
    assert KeeperLock.lock(directory, 1) is None
    assert held.stamp(100.0, "boot")
    assert held.stamp(100.0 + STAMP_EVERY_S / 2, "boot")  # too early for another one
    held.release()
    heir = KeeperLock.lock(directory, 1)
    assert heir.inherit(500.0, met=False) == (False, 100.0 + STAMP_EVERY_S + TTL_S + MARGIN_S, None, False)
    heir.release()


@pytest.mark.parametrize("written", [b"\0", b"{}", b'{"clock": "another boot", "boot": "b", "at": 1.0}'])
def test_what_cannot_be_understood_counts_as_if_it_had_lived_until_now(directory, written):
    (directory / "keeper.1.lock").write_bytes(written)
    held = KeeperLock.lock(directory, 1)
    assert held.inherit(500.0, met=False) == (False, 500.0 + TTL_S + MARGIN_S, None, False)
    held.release()


def test_whoever_has_met_a_keeper_does_not_believe_that_there_was_none(directory):
    held = KeeperLock.lock(directory, 1)
    assert held.inherit(500.0, met=True) == (False, 500.0 + TTL_S + MARGIN_S, None, False)
    held.release()


def test_a_stamp_says_at_once_when_a_worker_without_a_file_gets_shares(directory):
    for before, listed in ((False, True), (True, False)):
        held = KeeperLock.lock(directory, 1)
        assert held.stamp(100.0, "boot", listed=before)
        assert held.stamp(100.1, "boot", listed=listed)
        held.release()
        heir = KeeperLock.lock(directory, 1)
        assert heir.inherit(500.0, met=False).listed is listed
        heir.release()


def test_a_later_file_ends_the_one_before(directory):
    old = KeeperLock.lock(directory, 1)
    old.inherit(0.0, met=False)
    old.stamp(7.0, "old")
    assert old.is_current()
    new = KeeperLock.lock(directory, 2)
    assert not old.is_current()
    assert KeeperLock.lock(directory, 1) is None
    assert new.inherit(500.0, met=True) == (False, 7.0 + STAMP_EVERY_S + TTL_S + MARGIN_S, None, False)
    third = KeeperLock.lock(directory, 3)
    third.inherit(500.0, met=True)
    # The second file is gone, and the first one still knows that it is not current.
    assert [old.is_current(), new.is_current(), third.is_current()] == [False, False, True]
    for lock in (old, new, third):
        lock.release()


# The configuration


async def test_a_system_without_unix_sockets_is_told_so(directory, monkeypatch):
    monkeypatch.delattr(channels.socket, "AF_UNIX")
    with pytest.raises(ConfigurationError, match="Unix domain sockets"):
        open_channel(EngineConfig(shared="machine", shared_directory=str(directory)))


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"shared": "server"}, "needs shared_server"),
        ({"shared": "machine", "shared_server": {"url": "http://a"}}, "for `shared: server` only"),
        (
            {"shared": "auto", "shared_directory": "/tmp/x"},
            "for `shared: machine` only",
        ),
        ({"shared": "server", "shared_server": {"url": "a:80"}}, "must start with http"),
        ({"shared": "server", "shared_server": "a:80"}, "must start with http"),
        ({"shared": "server", "shared_server": {"url": "http://a", "token_env": "QREWARD_NO_SUCH"}}, "is not set"),
    ],
)
def test_a_mistake_in_the_configuration_is_named(settings, said):
    tree = {
        "sources": {"a": {"kind": "openai", "base_url": "http://localhost/v1", "model": "judge"}},
        "judges": {"quality": {"kind": "llm", "score_range": [0, 1]}},
        "engine": settings,
    }
    with pytest.raises(ConfigurationError, match=said):
        RewardEngine(tree)


def test_the_reward_server_may_be_a_url_alone():
    settings = EngineConfig(shared="server", shared_server="http://a:80")
    assert settings == EngineConfig(shared="server", shared_server={"url": "http://a:80"})


async def test_a_channel_that_is_never_used_starts_nothing(directory):
    channel = open_channel(EngineConfig(shared="machine", shared_directory=str(directory)))
    await channel.aclose()
    assert list(directory.iterdir()) == []
