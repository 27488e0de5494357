"""A source with several servers: siblings land together, a failed server loses no sample, and both are shown."""

from __future__ import annotations

import asyncio
from collections import Counter

import pytest

from qreward_plugins import RewardEngine, Scored
from qreward_plugins.server.exposition import exposition
from qreward_plugins.testing import Faults, JudgeServer, PlayFault

from ..kit import make_config, make_sample

pytestmark = pytest.mark.anyio

PREFIX = ("prefix_aware", "least_pending_tokens")
# Eight answers to each of 12 questions.
GROUPS = [
    make_sample(question, id=f"{question}-{answer}", response=f"I think it is {answer}.")
    for question in range(12)
    for answer in range(8)
]


class Seen(JudgeServer):
    """A judge server that remembers the questions."""

    def __init__(self):
        self.calls = []
        super().__init__(self._scored)

    def _scored(self, call):
        self.calls.append(call.blocks["question"])
        return 5.0


def engine_of(*servers, routing=PREFIX, **more):
    config = make_config({"judge": servers[0]}, engine={"scheduling": {"hedge": False}, "deadline_s": 30, **more})
    config["sources"]["judge"] |= {"base_url": [each.base_url for each in servers], "routing": list(routing)}
    return RewardEngine(config)


def replicas_of(engine):
    """What is known of the replicas. Nothing may be under way."""
    replicas = engine.statistics().sources["judge"].replicas
    assert all(replica.in_flight == replica.pending_tokens == 0 for replica in replicas)
    return replicas


def lost(outcomes):
    return [number for number, outcome in enumerate(outcomes) if not isinstance(outcome, Scored)]


@pytest.mark.parametrize(("routing", "places"), [(("prefix_aware",), (12, 18)), (("round_robin",), (24, 24))])
async def test_the_siblings_of_a_group_are_judged_at_one_server(routing, places):
    with Seen() as one, Seen() as two:
        async with engine_of(one, two, routing=routing) as engine:
            assert lost(await engine.score_all(GROUPS)) == []
            replicas, metrics = replicas_of(engine), exposition(engine.statistics(), 0, Counter()).decode()
    homes = {(question, server.base_url) for server in (one, two) for question in server.calls}
    assert places[0] <= len(homes) <= places[1]
    assert [replica.requests for replica in replicas] == [len(one.calls), len(two.calls)]
    assert all(replica.health == "up" and replica.prompt_tokens > 0 for replica in replicas)
    for server in (one, two):
        at = f'{{replica="{server.base_url}",source="judge"}}'
        assert f"qreward_replica_requests_total{at} {float(len(server.calls))}" in metrics


async def test_a_server_that_dies_loses_no_sample():
    with Seen() as one, Seen() as two:
        async with engine_of(one, two) as engine:
            await engine.score_all(GROUPS[:8])
            one.stop()
            assert lost(await engine.score_all(GROUPS)) == []
            assert replicas_of(engine)[0].failures > 0


@pytest.mark.parametrize("fault", ["error_400", "error_422", "error_500", "html", "prose", "refusal"])
@pytest.mark.parametrize("routing", [PREFIX, ("least_requests",)])
async def test_one_of_three_servers_may_be_broken(fault, routing):
    """Nothing that it answers, or answers with, costs a sample, although it is quicker than the others."""

    async def slowly(call):
        await asyncio.sleep(0.2)
        return 5.0

    with (
        JudgeServer(faults=Faults(rates={fault: 1.0})) as one,
        JudgeServer(slowly) as two,
        JudgeServer(slowly) as three,
    ):
        async with engine_of(one, two, three, routing=routing) as engine:
            assert lost(await engine.score_all(GROUPS)) == []
            assert replicas_of(engine)[0].requests < len(GROUPS) / 2


async def test_a_response_that_all_servers_refuse_is_its_own_failure():
    """Each server is asked at most once, and none is avoided for it."""
    asked = []

    def scored(call):
        asked.append(call.blocks["response"])
        if "it is 3." in call.blocks["response"]:
            raise PlayFault("error_400")
        return 5.0

    with JudgeServer(scored) as one, JudgeServer(scored) as two, JudgeServer(scored) as three:
        async with engine_of(one, two, three) as engine:
            assert lost(await engine.score_all(GROUPS[:16])) == [3, 11]
            replicas = replicas_of(engine)
    assert 4 <= sum("it is 3." in response for response in asked) <= 6
    assert [(replica.failures, replica.health) for replica in replicas] == [(0, "up")] * 3
