"""Limits of requests and tokens, of each of several keys, and of dollars: what is spent, what is learned, and what one
absurd reply may not do.
"""

from __future__ import annotations

import asyncio
import random
import re

import pytest

from qreward_plugins import BudgetSpent, RewardEngine, Scored, Throttled, Usage
from qreward_plugins.errors import TransientError
from qreward_plugins.simulation import SimulatedSource
from qreward_plugins.sources import Reply
from qreward_plugins.testing import JudgeServer, ServerLimits

from ..kit import (
    FRAMEWORKS,
    Stage,
    each_of,
    fails,
    hangs,
    make_config,
    make_sample,
    make_samples,
    mistakes_of,
    play,
    scored_text,
)

pytestmark = pytest.mark.anyio
WINDOW_S = 60.0


def strict(name="a", *, tokens_of=None, behaviour=lambda number, request, now: 0.5, **limits):
    """A source that enforces its limits, with these (requests_per_minute, tokens_per_minute, concurrency)."""

    def answer(request):
        usage = Usage(tokens_of(request) if tokens_of else 100, 20)
        return Reply(text=scored_text(request).text, usage=usage, model="m")

    names = {"requests_per_minute": "requests_per_window", "tokens_per_minute": "tokens_per_window"}
    enforced = {names.get(key, key): value for key, value in limits.items()}
    return SimulatedSource(name, behaviour=behaviour, answer=answer, model="m", **enforced)


def stage_of(source, *, judge=None, **limits):
    options = {"engine": {"deadline_s": 3000.0, "scheduling": {"hedge": False}}, "limits": {source.name: limits}}
    return Stage({source.name: source}, options=options | {"judge": judge or {}})


@pytest.mark.parametrize("per_byte", [0.05, 0.25, 1.0], ids=["few", "usual", "many"])
def test_tokens_are_reserved_so_that_no_window_is_over_whatever_the_text_is(per_byte):
    rng = random.Random(1)
    limit = 60_000
    source = strict(tokens_per_minute=limit, tokens_of=lambda request: int(per_byte * request.size))
    samples = [make_sample(number, response="x" * rng.randrange(100, 4000)) for number in range(80)]
    stage = stage_of(source, tokens_per_minute=limit, judge={"max_tokens": 20})
    played = stage.play(samples)
    assert source.violations == []
    assert played.all_scored


@pytest.mark.parametrize(("usage", "problem"), [(None, "no usage"), (Usage(50_000, 20), "more tokens than its texts")])
def test_a_source_whose_usage_costs_samples_their_place_is_told_of_once(caplog, usage, problem):
    stage = Stage(answer=lambda request: Reply(text=scored_text(request).text, usage=usage))
    for limits, told in (({"requests_per_minute": 600}, 0), ({"tokens_per_minute": 10**6}, 1)):
        stage.options["limits"] = {"a": limits}
        assert stage.play(make_samples(5)).all_scored
        assert caplog.text.count(f"source a states {problem}") == told


def test_a_request_that_can_never_fit_fails_at_once_and_one_that_may_goes_alone_and_last():
    source = strict(tokens_per_minute=4000, tokens_of=lambda request: request.size // 6)
    judge = {"max_tokens": 20}
    played = stage_of(source, tokens_per_minute=4000, judge=judge).play(
        [make_sample(0, response="x" * 200_000), make_sample(1, response="y" * 12_000), *make_samples(12)[2:]],
        deadline_s=900.0,
    )
    assert played.outcomes[0].label == "infra/no_source"
    assert "tokens" in played.outcomes[0].detail
    assert all(isinstance(outcome, Scored) for outcome in played.outcomes[1:])


def test_a_429_pauses_the_source_as_long_as_it_says_and_is_no_failure():
    for retry_after_s, least_s, most_s in (
        (7.0, 7.0, 8.0),
        (0.0, 0.0, 1.0),
        (None, 0.9, 2.0),
        (float("nan"), 0.9, 2.0),
        (1e9, 60.0, 61.0),  # P11: a probe a minute ends an absurd pause
    ):
        source = strict(behaviour=fails(Throttled("429", retry_after_s=retry_after_s), times=3, seconds=0.5))
        options = {"engine": {"deadline_s": 300.0, "max_attempts": 1, "scheduling": {"hedge": False}}}
        stage = Stage({"a": source}, options=options | {"limits": {"a": {"concurrency": 3}}})
        played = stage.play(make_samples(10))
        assert played.all_scored
        later = [at for at in source.arrivals if at > 0.0]
        assert least_s <= later[0] <= most_s, retry_after_s


def test_a_throttled_sample_moves_on_at_once_where_another_source_is_free():
    a = strict("a", behaviour=fails(Throttled("429", retry_after_s=30.0), seconds=0.5))
    b = strict("b")
    options = {"engine": {"deadline_s": 300.0, "scheduling": {"hedge": False}}}
    played = Stage({"a": a, "b": b}, options=options).play(make_samples(20))
    assert played.all_scored
    assert played.shares == {"b": 20}
    assert played.finished_s < 5.0
    assert played.statistics.sources["a"].throttled >= 1


@pytest.mark.parametrize("samples", [90, 200])
def test_a_limit_that_is_measured_while_requests_are_under_way_is_told_as_a_bound(samples, caplog):
    """Nobody knows yet which of them are accepted. Each 429 that follows lowers the limit, before it is of use."""

    async def main(engine):
        scoring = asyncio.ensure_future(engine.score_all(make_samples(samples)))
        await asyncio.sleep(10.0)
        learned = engine.statistics().sources["a"].learned
        assert all(isinstance(outcome, Scored) for outcome in await scoring)
        return learned

    assert Stage({"a": strict(requests_per_minute=60)}).run(main) == "really about 60 requests a minute"
    told = [re.search(r"at most (\d+) requests .* not answered yet", each.message) for each in caplog.records]
    bounds = [int(found[1]) for found in told if found]
    assert len(bounds) == 1
    assert 60 <= bounds[0] < samples


# A source with several keys: each has its own limits and health, and verdicts know one source


KEYS = ("sk-one-0123456789abcdef", "sk-two-0123456789abcdef", "sk-three-0123456789abcdef")


@pytest.fixture
def tree(monkeypatch):
    def make(server, **more):
        names = [f"KEY_{number}" for number in range(len(KEYS))]
        for name, key in zip(names, KEYS, strict=True):
            monkeypatch.setenv(name, key)
        return make_config({"judge": server}, source={"api_key_env": names}, **more)

    return make


async def test_each_key_has_its_own_limits(tree):
    # 8 requests a minute for each key: 24 are scored at once, and three samples would have to wait for a minute.
    limits = ServerLimits(requests_per_minute=8)
    with JudgeServer(lambda call: 0.5, api_key=KEYS, limits=limits) as server:
        config = tree(server, limits={"judge": {"requests_per_minute": 8}})
        async with RewardEngine(config) as engine:
            outcomes = await engine.score_all([make_sample(n) for n in range(27)], deadline_s=3)
            sources = engine.statistics().sources
            facts = engine.facts()
        assert server.report().violations_total == 0
    assert [outcome.verdict.source for outcome in outcomes if isinstance(outcome, Scored)] == ["judge"] * 24
    assert {name: source.requests for name, source in sources.items()} == {f"judge#{n}": 8 for n in (1, 2, 3)}
    assert facts is not None


async def test_a_revoked_key_takes_only_itself_out(tree, caplog):
    with JudgeServer(lambda call: 0.5, api_key=KEYS) as server:
        async with RewardEngine(tree(server)) as engine:
            assert all(isinstance(o, Scored) for o in await engine.score_all([make_sample(n) for n in range(30)]))
            server.revoke(KEYS[1])
            outcomes = await engine.score_all([make_sample(n) for n in range(30, 90)])
            states = {name: source.state for name, source in engine.statistics().sources.items()}
    assert all(isinstance(outcome, Scored) for outcome in outcomes)
    assert states["judge#2"] == "unusable"
    assert "unusable" not in (states["judge#1"], states["judge#3"])
    assert "judge#2" in caplog.text
    assert not any(key in caplog.text for key in KEYS)


async def test_a_source_is_released_with_all_its_keys(tree):
    async with RewardEngine(tree("http://127.0.0.1:1/v1")) as engine:
        engine.hold("judge#1")
        engine.hold("judge")
        engine.release("judge")
        assert {source.state for source in engine.statistics().sources.values()} == {"up"}


@pytest.mark.parametrize("sources", [["judge"], ["jud*"], ["*ge"], ["model:judge"], []])
def test_a_judge_names_the_source_and_means_all_its_keys(tree, sources):
    engine = RewardEngine(tree("http://a.invalid/v1", judge={"sources": sources}))
    assert engine.judges["quality"].sources == ("judge#1", "judge#2", "judge#3")


@pytest.mark.parametrize(
    ("keys", "places", "said"),
    [
        (["SET", "UNSET", "GONE"], ["[1]", "[2]"], "is not set"),
        (["SET", "ODD"], ["[1]"], "characters that a header cannot carry"),
        (["SET", "NAMED"], ["[1]"], "${oc.env:NAME}"),
    ],
)
def test_wrong_keys_are_refused_by_path_and_never_shown(monkeypatch, keys, places, said):
    monkeypatch.setenv("SET", KEYS[0])
    monkeypatch.setenv("ODD", "k\u00e92")
    monkeypatch.setenv("NAMED", "$OPENAI_API_KEY")
    found = mistakes_of(RewardEngine, make_config("ab", source={"api_key_env": keys}))
    assert not any(key in str(found) for key in KEYS)
    assert all(said in told for told in found.values()), found
    assert [*found] == [f"sources.{name}.api_key_env{place}" for name in "ab" for place in places]


# Budgets in dollars: no more than they say is spent, whatever fails, and what happens when they are spent


PRICE = {"per_request": 0.01}
BY_TOKENS = {"output_per_million": 1000.0}


def budgeted(budget=None, *, names="a", price=PRICE, **options):
    """A configuration in which the source `a` has this budget."""
    tree = make_config([*names], **options)
    for node in tree["sources"].values():
        node["price"] = price
    if budget is not None:
        tree["sources"]["a"]["budget"] = budget
    return tree


def labels(outcomes):
    return [outcome.failure and outcome.failure.label for outcome in outcomes]


def test_a_spent_budget_fails_the_rest_at_once_with_its_reason():
    stage = Stage(tree=budgeted({"usd": 0.25}))
    played = stage.play(make_samples(100))
    assert (labels(played.outcomes).count(None), labels(played.outcomes).count("infra/budget")) == (25, 75)
    failed = next(outcome.failure for outcome in played.outcomes if outcome.failure)
    spent = "the budget of source a is spent (0.25 USD a run): the rest does not pay for one more call"
    assert failed.detail == f"{spent}, which may cost 0.01 USD"
    assert (len(stage.sent), played.finished_s < 5.0) == (25, True)
    source = played.statistics.sources["a"]
    assert (source.cost_usd, source.budget_left_usd) == (pytest.approx(0.25), pytest.approx(0.0, abs=1e-9))


def test_the_most_that_an_attempt_can_cost_is_set_aside_and_what_it_did_cost_is_spent():
    """Each may cost about half a dollar, and costs two cents."""
    stage = Stage(tree=budgeted({"usd": 1.5}, price=BY_TOKENS))
    played = stage.play(make_samples(100))
    cost = played.statistics.sources["a"].cost_usd
    most = max(len([each for each in stage.sent if each.at == sent.at]) for sent in stage.sent)
    assert (1.0 < cost <= 1.5, 1 < most < 10) == (True, True)
    assert labels(played.outcomes).count("infra/budget") == 100 - round(cost / 0.02)


def test_the_budget_of_the_run_is_that_of_all_sources_together():
    tree = budgeted(names="ab", engine={"budget": {"usd": 0.3}})
    stage = Stage({"a": 1.0, "b": 1.0}, tree=tree)
    played = stage.play(make_samples(60))
    assert (len(stage.sent), labels(played.outcomes).count("infra/budget")) == (30, 30)
    assert "the budget of the run is spent" in str([outcome.failure for outcome in played.outcomes])


def test_an_hours_budget_is_there_again_after_an_hour():
    async def main(engine):
        first = await engine.score_all(make_samples(6))
        await asyncio.sleep(3590.0)
        again = await engine.score_all(make_samples(6))
        await asyncio.sleep(12.0)
        return [labels(each).count(None) for each in (first, again, await engine.score_all(make_samples(6)))]

    assert Stage(tree=budgeted({"usd": 0.04, "per": "hour"})).run(main) == [4, 0, 4]


@each_of(
    ("behaviour", "answer", "price", "sent"),
    [
        # A server that states an error has not charged; one that falls silent may have.
        (lambda n, request, now: TransientError("busy", status=503), scored_text, PRICE, 11),
        (lambda n, request, now: TransientError("reset"), scored_text, PRICE, 10),
        (lambda n, request, now: TransientError("cut off", status=200), scored_text, PRICE, 10),
        (hangs, scored_text, PRICE, 10),
        # Without a usage the most that it can be counts.
        (1.0, lambda request: Reply(text=scored_text(request).text, model="m"), {"output_per_million": 100.0}, 1),
    ],
)
def test_what_nobody_knows_the_cost_of_counts_as_the_most(behaviour, answer, price, sent):
    tree = budgeted({"usd": 0.1}, price=price, total_s=5, engine={"max_attempts": 3, "deadline_s": 100.0})
    stage = Stage({"a": behaviour}, answer=answer, tree=tree)
    stage.play(make_samples(10))
    assert min(len(stage.sent), 11) == sent


async def raises(engine):
    assert labels(await engine.score_all(make_samples(5))) == [None] * 5
    with pytest.raises(BudgetSpent, match=r"^the budget of source a is spent \(0\.05 USD a run\): the rest"):
        await engine.score_all(make_samples(8)[5:])


@pytest.mark.parametrize("judges", [{}, {"whole": {"kind": "sum", "weights": {"quality": 1}}}], ids=["leaf", "sum"])
def test_raise_ends_the_run_with_one_error(judges):
    tree = budgeted({"usd": 0.05, "on_spent": "raise"})
    tree["judges"] |= judges
    Stage(tree=tree).run(raises)


@pytest.mark.parametrize("framework", FRAMEWORKS)
def test_raise_ends_the_training(framework):
    with JudgeServer(lambda call: 5.0) as server:
        tree = make_config({"a": server}, engine={"shared": "local"})
        tree["sources"]["a"] |= {"price": PRICE, "budget": {"usd": 0.02, "on_spent": "raise"}}
        with pytest.raises(BudgetSpent):
            play(framework, ["1", "2", "3", "4"], tree)
