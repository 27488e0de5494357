"""A source with several servers: siblings land together, a failed server loses no sample, and both are shown."""

from __future__ import annotations

import asyncio
from collections import Counter

import pytest

from qreward_plugins import RewardEngine, Scored
from qreward_plugins.server.exposition import exposition
from qreward_plugins.testing import Faults, JudgeServer, PlayFault

from ..kit import make_config, make_sample


@pytest.fixture
def tree():
    def make(*servers, routing=("prefix_aware", "least_pending_tokens"), **more):
        config = make_config({"judge": servers[0]}, **more)
        config["sources"]["judge"]["base_url"] = [server.base_url for server in servers]
        if routing is not None:
            config["sources"]["judge"]["routing"] = list(routing)
        return config

    return make


@pytest.fixture
def groups():
    """Eight answers to each of 12 questions."""
    return [
        make_sample(question, id=f"{question}-{answer}", response=f"I think it is {answer}.")
        for question in range(12)
        for answer in range(8)
    ]


def homes(servers):
    """The servers at which each question was judged."""
    found = {}
    for number, server in enumerate(servers):
        for call in server.calls:
            found.setdefault(call, Counter())[number] += 1
    return found


class Seen(JudgeServer):
    """A judge server that remembers the questions."""

    def __init__(self):
        self.calls = []
        super().__init__(self._scored)

    def _scored(self, call):
        self.calls.append(call.blocks["question"])
        return 5.0


@pytest.mark.anyio
@pytest.mark.parametrize(("routing", "places"), [(("prefix_aware",), (12, 18)), (("round_robin",), (24, 24))])
async def test_the_siblings_of_a_group_are_judged_at_one_server(tree, groups, routing, places):
    with Seen() as one, Seen() as two:
        async with RewardEngine(tree(one, two, routing=routing)) as engine:
            outcomes = await engine.score_all(groups)
            replicas = engine.statistics().sources["judge"].replicas
        assert all(isinstance(outcome, Scored) for outcome in outcomes)
        assert places[0] <= sum(map(len, homes([one, two]).values())) <= places[1]
        assert [replica.requests for replica in replicas] == [len(one.calls), len(two.calls)]
        assert all(replica.in_flight == replica.pending_tokens == 0 for replica in replicas)
        assert all(replica.health == "up" and replica.prompt_tokens > 0 for replica in replicas)


@pytest.mark.anyio
async def test_a_server_that_dies_loses_no_sample(tree, groups):
    with Seen() as one, Seen() as two:
        async with RewardEngine(tree(one, two)) as engine:
            await engine.score_all(groups[:8])
            one.stop()
            outcomes = await engine.score_all(groups, deadline_s=30)
        # A hedge that lost may end a moment after the outcome.
        replicas = engine.statistics().sources["judge"].replicas
        assert all(isinstance(outcome, Scored) for outcome in outcomes)
        assert replicas[0].failures > 0
        assert all(replica.in_flight == replica.pending_tokens == 0 for replica in replicas)


@pytest.mark.anyio
@pytest.mark.parametrize("fault", ["error_400", "error_500", "html", "prose", "refusal"])
@pytest.mark.parametrize("routing", [("prefix_aware", "least_pending_tokens"), ("least_requests",)])
async def test_one_of_three_servers_may_be_broken(tree, groups, fault, routing):
    """Nothing that it answers, or answers with, costs a sample, although it is quicker than the others."""

    async def slowly(call):
        await asyncio.sleep(0.2)
        return 5.0

    faults = Faults(rates={fault: 1.0})
    with JudgeServer(faults=faults) as one, JudgeServer(slowly) as two, JudgeServer(slowly) as three:
        config = tree(one, two, three, routing=routing, engine={"scheduling": {"hedge": False}})
        async with RewardEngine(config) as engine:
            outcomes = await engine.score_all(groups, deadline_s=30)
            replicas = engine.statistics().sources["judge"].replicas
        assert [outcome.describe() for outcome in outcomes if not isinstance(outcome, Scored)] == []
        assert replicas[0].requests < len(groups) / 2


@pytest.mark.anyio
async def test_a_response_that_all_servers_refuse_is_its_own_failure(tree, groups):
    """Each server is asked at most once, and none is avoided for it."""
    asked = []

    def scored(call):
        asked.append(call.blocks["response"])
        if "it is 3." in call.blocks["response"]:
            raise PlayFault("error_400")
        return 5.0

    with JudgeServer(scored) as one, JudgeServer(scored) as two, JudgeServer(scored) as three:
        async with RewardEngine(tree(one, two, three, engine={"scheduling": {"hedge": False}})) as engine:
            outcomes = await engine.score_all(groups[:16], deadline_s=30)
            replicas = engine.statistics().sources["judge"].replicas
        refused = [number for number, outcome in enumerate(outcomes) if not isinstance(outcome, Scored)]
        assert refused == [3, 11]
        assert 4 <= sum("it is 3." in response for response in asked) <= 6
        assert [(replica.failures, replica.health) for replica in replicas] == [(0, "up")] * 3


@pytest.mark.anyio
async def test_metrics_show_every_replica_up_to_a_bound(tree, groups, monkeypatch):
    with Seen() as one, Seen() as two:
        async with RewardEngine(tree(one, two)) as engine:
            await engine.score_all(groups[:16])
            statistics = engine.statistics()
            text = exposition(statistics, 0, Counter()).decode()
            for server in (one, two):
                at = f'{{replica="{server.base_url}",source="judge"}}'
                assert f"qreward_replica_in_flight{at} 0.0" in text
                assert f"qreward_replica_requests_total{at} {float(len(server.calls))}" in text
            assert 'health="up"' in text
            monkeypatch.setattr("qreward_plugins.server.exposition._MOST_REPLICAS", 1)
            assert two.base_url not in exposition(statistics, 0, Counter()).decode()
