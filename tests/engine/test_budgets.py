"""Budgets in dollars: no more than they say is spent, whatever fails, and what happens when they are spent."""

from __future__ import annotations

import asyncio

import pytest

from qreward_plugins import BudgetSpent, ConfigurationError, load_config
from qreward_plugins.errors import TransientError
from qreward_plugins.sources import Reply
from qreward_plugins.testing import JudgeServer
from tests.kit import FRAMEWORKS, Stage, each_of, hangs, make_config, make_samples, play, scored_text

pytestmark = pytest.mark.anyio

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
    assert failed.detail == "the budget of source a is spent (0.25 USD a run)"
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


def unstated(request):
    return Reply(text=scored_text(request).text, model="m")


@each_of(
    ("behaviour", "answer", "price", "sent"),
    [
        # A server that states an error has not charged; one that falls silent may have.
        (lambda n, request, now: TransientError("busy", status=503), scored_text, PRICE, 11),
        (lambda n, request, now: TransientError("reset"), scored_text, PRICE, 10),
        (lambda n, request, now: TransientError("cut off", status=200), scored_text, PRICE, 10),
        (hangs, scored_text, PRICE, 10),
        # Without a usage the most that it can be counts.
        (1.0, unstated, {"output_per_million": 100.0}, 1),
    ],
)
def test_what_nobody_knows_the_cost_of_counts_as_the_most(behaviour, answer, price, sent):
    tree = budgeted({"usd": 0.1}, price=price, total_s=5, engine={"max_attempts": 3, "deadline_s": 100.0})
    stage = Stage({"a": behaviour}, answer=answer, tree=tree)
    stage.play(make_samples(10))
    assert min(len(stage.sent), 11) == sent


async def raises(engine):
    assert labels(await engine.score_all(make_samples(5))) == [None] * 5
    with pytest.raises(BudgetSpent, match=r"^the budget of source a is spent \(0\.05 USD a run\)$"):
        await engine.score_all(make_samples(8)[5:])


@pytest.mark.parametrize("judges", [{}, {"whole": {"kind": "sum", "weights": {"quality": 1}}}], ids=["leaf", "sum"])
def test_raise_ends_the_run_with_one_error(judges):
    tree = budgeted({"usd": 0.05, "on_spent": "raise"})
    tree["judges"] |= judges
    Stage(tree=tree).run(raises)


@each_of(
    ("tree", "mistake"),
    [
        (budgeted({"usd": 5}, price={}), r"sources\.a\.budget: the source has no price to count by; set `price`"),
        (
            budgeted(price={}, engine={"budget": {"usd": 5}}),
            r"engine\.budget: no source has a price to count by\. Set `sources\.NAME\.price`",
        ),
        (budgeted({"usd": 0}), r"sources\.a\.budget\.usd: must be above 0"),
    ],
)
def test_a_budget_that_cannot_be_kept_is_refused_at_the_start(tree, mistake):
    with pytest.raises(ConfigurationError, match=mistake):
        load_config(tree)


@pytest.mark.parametrize("framework", FRAMEWORKS)
def test_raise_ends_the_training(framework):
    with JudgeServer(lambda call: 5.0) as server:
        tree = make_config({"a": server}, engine={"shared": "local"})
        tree["sources"]["a"] |= {"price": PRICE, "budget": {"usd": 0.02, "on_spent": "raise"}}
        with pytest.raises(BudgetSpent):
            play(framework, ["1", "2", "3", "4"], tree)


def test_another_budget_needs_a_restart():
    async def main(engine):
        for changed in (budgeted({"usd": 2}), budgeted()):
            with pytest.raises(ConfigurationError, match=r"sources\.a\.budget\S*: this change needs a restart"):
                await engine.reload(changed)

    Stage(tree=budgeted({"usd": 1})).run(main)
