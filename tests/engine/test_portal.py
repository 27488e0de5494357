"""The portal: one engine for threads and event loops that come and go."""

from __future__ import annotations

import subprocess
import sys
from concurrent.futures import CancelledError

import pytest

from qreward_plugins import EngineError, RewardEngine, load_config, process_portal
from qreward_plugins.engine.process_portals import close_process_portals
from qreward_plugins.testing import JudgeServer

from ..kit import make_config, make_sample


@pytest.fixture
def judge():
    with JudgeServer(lambda call: 0.25) as server:
        yield server


@pytest.fixture
def portal(judge):
    with RewardEngine(make_config({"a": judge})).portal() as portal:
        yield portal


def test_futures_give_outcomes(portal):
    assert portal.submit(make_sample()).result().reward == 0.025
    outcomes = portal.submit_all([make_sample(1), make_sample(2)]).result()
    assert [outcome.reward for outcome in outcomes] == [0.025, 0.025]
    assert portal.statistics().scored == 3


def test_cancelling_a_future_cancels_its_attempts(portal, judge):
    judge.hold()
    one, many = portal.submit(make_sample()), portal.submit_all([make_sample(1), make_sample(2)])
    judge.wait_for(lambda report: report.in_flight == 3)
    one.cancel()
    many.cancel()
    assert judge.wait_for(lambda report: report.in_flight == 0).abandoned == 3
    judge.release()
    for future in (one, many):
        with pytest.raises(CancelledError):
            future.result()


def test_a_process_has_one_portal_for_equal_configurations(judge):
    config = load_config(make_config({"a": judge}))
    try:
        portal = process_portal(config)
        assert process_portal(load_config(make_config({"a": judge}))) is portal
        assert process_portal(load_config(make_config({"a": judge}, engine={"deadline_s": 9}))) is not portal
        assert portal.config == config
        assert portal.score(make_sample()).reward == 0.025
    finally:
        close_process_portals()
    close_process_portals()
    with pytest.raises(EngineError, match="this portal is closed"):
        portal.score(make_sample())
    try:
        assert process_portal(config).score(make_sample()).reward == 0.025
    finally:
        close_process_portals()


FORKED = """
import os, signal, sys
from qreward_plugins import EngineError, RewardEngine, Sample, load_config, process_portal
def one(sample):
    return 1.0

tree = {
    "sources": {"f": {"kind": "function", "function": "__main__:one", "mode": "thread", "arguments": "sample"}},
    "judges": {"j": {"kind": "function"}},
}
sample = Sample([{"role": "user", "content": "?"}], "x")

def child(portal):
    signal.alarm(40)
    for call in (lambda: portal.score(sample), lambda: list(portal.score_stream([sample])), portal.statistics):
        try:
            call()
        except EngineError as error:
            assert "fork" in str(error)
            print("refused", flush=True)

with RewardEngine(tree).portal() as portal:
    portal.score(sample)
    parent = os.fork()
    os.wait() if parent else child(portal)
if not parent:
    print("left", flush=True)
    os._exit(0)
shared = process_portal(load_config(tree))
print(shared.score(sample).reward, flush=True)
if os.fork() == 0:
    child(shared)
    print(process_portal(load_config(tree)).score(sample).reward, flush=True)
    sys.exit(0)
print(os.waitstatus_to_exitcode(os.wait()[1]), flush=True)
"""


def test_a_portal_that_was_opened_before_a_fork_says_so_and_does_not_hang():
    done = subprocess.run([sys.executable, "-c", FORKED], capture_output=True, text=True, check=True, timeout=60)
    assert done.stdout.split() == [*["refused"] * 3, "left", "1.0", *["refused"] * 3, "1.0", "0"], done.stderr
