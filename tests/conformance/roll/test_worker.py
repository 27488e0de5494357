"""The reward worker on a real cluster: what it returns, how much it carries, and how long it takes at most."""

from __future__ import annotations

import pytest

from ..judges import GROUP_SIZE, ITEMS, Draft, Judge
from .checks import METRICS, close
from .real import scenario_keys
from .scenarios import CORRECT_AT, DIRECT_SLOW, DIRECT_UNEVEN, Scenario

RULED = {
    "worker_cls": (
        "roll.pipeline.rlvr.rewards.multiple_choice_boxed_rule_reward_worker.MultipleChoiceBoxedRuleRewardWorker"
    ),
    "model_args": {"model_name_or_path": "${pretrain}"},
    "tag_included": ["ruled_tag"],
    "world_size": 1,
}
"""A rule worker of ROLL's own as a second domain."""


@pytest.fixture
def hire(player):
    """Start workers under a key for one test."""
    keys = []

    def hire(key, party):
        keys.append(key)
        wrong = player.must("hire", parties={key: party})
        assert wrong[key] is None, wrong

    yield hire
    for key in keys:
        if player.alive:
            player.must("let_go", key=key)


def whole_group(item):
    return [[item, draft] for draft in range(GROUP_SIZE)]


@pytest.mark.parametrize("requests", [[[[0, 0]]], [whole_group(1)], [[*whole_group(1), *whole_group(3)]]], ids=len)
def test_exactly_three_finite_tensors_come_back(companies, requests):
    with companies.company(DIRECT_UNEVEN) as company:
        (answer,) = companies.player.must("score", key=company.key, requests=requests)
    (request,) = requests
    assert set(answer["tensors"]) == {"token_level_rewards", "response_level_rewards", "scores"}
    assert answer["non_tensors"] == []
    assert {tensor["dtype"] for tensor in answer["tensors"].values()} == {"torch.float32"}
    assert answer["tensors"]["token_level_rewards"]["shape"] == [len(request), 16]
    assert not any(map(any, answer["tensors"]["token_level_rewards"]["values"]))
    for name in ("response_level_rewards", "scores"):
        assert answer["tensors"][name]["shape"] == [len(request)]
    causes = answer["causes"]
    drafts = [Draft(*draft) for draft in request]
    assert [bool(cause) for cause in causes] == [DIRECT_UNEVEN.judge.spoils(draft) for draft in drafts]
    for draft, cause, reward in zip(drafts, causes, answer["tensors"]["response_level_rewards"]["values"], strict=True):
        expected = Draft(draft.item, 2).reward if cause else draft.reward  # of an odd item only that one is scored
        assert close(reward, expected)


def test_metrics_are_numbers_with_the_same_keys_whoever_failed(companies):
    requests = [[[0, 0]], [[1, 0]], [[1, 2]], whole_group(1), whole_group(0)]
    with companies.company(DIRECT_UNEVEN) as company:
        answers = companies.player.must("score", key=company.key, requests=requests)
    blame = "qreward/blame_s/"
    told = {scored: set() for scored in (True, False)}
    for answer in answers:
        names = frozenset(name for name in answer["metrics"] if not name.startswith(blame))
        told[not all(answer["causes"])].add(names)
    (of_scored,), (of_failed,) = told[True], told[False]
    # A call without a scored sample has no rewards to describe, and no 0.0 in their place.
    assert of_failed < of_scored
    assert all(name.startswith(("qreward/reward_", "qreward/data/", "qreward/acc")) for name in of_scored - of_failed)
    # A judge that spoils the last sample of all is waited for in retries.
    assert any(name.startswith(f"{blame}judge/") for answer in answers for name in answer["metrics"])
    assert set(answers[0]["metrics"]) >= METRICS
    for answer in answers:
        assert all(type(value) in (int, float) for value in answer["metrics"].values()), answer["metrics"]
        assert answer["reduced"] == answer["metrics"]


def test_a_worker_carries_a_thousand_calls_at_once(companies):
    requests = [[[number % ITEMS, number % GROUP_SIZE]] for number in range(1000)]
    with companies.company(DIRECT_SLOW) as company:
        answers = companies.player.must("score", key=company.key, requests=requests)
        report = company.judge.server.report()
    assert report.peak_concurrency == 64, "as many at once as the configuration allows"
    assert report.violations_total == 0
    for (draft,), answer in zip(requests, answers, strict=True):
        assert answer["causes"] == [""]
        assert close(answer["tensors"]["response_level_rewards"]["values"][0], Draft(*draft).reward)


def test_domains_of_other_workers_concatenate_with_ours(companies, hire):
    """ROLL's reward scheduler breaks where the workers of two domains return other tensors."""
    with DIRECT_UNEVEN.judge.start() as judge:
        keys = scenario_keys(DIRECT_UNEVEN, judge.base_url)
        keys["rewards"]["ruled"] = RULED
        hire("domains", keys)
        rows = [
            [domain, item, draft]
            for item in range(3)
            for draft in range(GROUP_SIZE)
            for domain in (("judged", "ruled") if draft % 2 else ("ruled", "judged"))
        ]
        answer = companies.player.must("schedule", key="domains", rows=rows, keys=keys)
    assert set(answer["tensors"]) == {"token_level_rewards", "response_level_rewards", "scores"}
    rewards = answer["tensors"]["response_level_rewards"]["values"]
    assert len(rewards) == len(rows)
    for (domain, *draft), reward, score in zip(rows, rewards, answer["tensors"]["scores"]["values"], strict=True):
        draft = Draft(*draft)
        if domain == "ruled":
            assert score == 0.0, "the responses choose none of its letters"
        elif not DIRECT_UNEVEN.judge.spoils(draft):
            assert close(reward, draft.reward)
            assert score == float(draft.reward >= CORRECT_AT)


def test_a_call_is_back_well_before_rolls_time_out(player, hire):
    """ROLL ends the training when a call takes longer than `rpc_timeout`."""
    scenario = Scenario("hanging", Judge(answers=0), "none")
    with scenario.judge.start() as judge:
        hire("hanging", {**scenario_keys(scenario, judge.base_url), "rpc_timeout": 2})
        reply = player.ask("score", key="hanging", requests=[[[0, 0]]])
    assert reply.error is None, reply.text
    assert reply.result[0]["causes"] == ["infra/deadline"]
    assert reply.result[0]["metrics"]["qreward/latency_s_max"] < 2
