"""The portal: one engine for threads and event loops that come and go."""

from __future__ import annotations

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
