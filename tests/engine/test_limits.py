"""Limits, tokens, 429s and pauses: what is spent, what is learned, and what one absurd reply may not do."""

from __future__ import annotations

import random

import pytest

from qreward_plugins import Scored, Throttled, Usage
from qreward_plugins.simulation import SimulatedSource
from qreward_plugins.sources import Reply

from ..kit import Stage, fails, make_sample, make_samples, scored_text

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


def test_what_was_answered_is_learned_so_that_the_limit_is_used():
    limit = 30_000
    source = strict(tokens_per_minute=limit, tokens_of=lambda request: request.size // 5)
    samples = [make_sample(number, response="word " * 400) for number in range(60)]
    played = stage_of(source, tokens_per_minute=limit, judge={"max_tokens": 20}).play(samples)
    assert played.all_scored
    assert played.finished_s / WINDOW_S < 1.7 * (60 * 900 / limit)


def test_single_replies_that_announce_an_absurd_limit_change_nothing_among_replies_that_announce_none():
    absurd = {"requests_per_window": 1.0, "requests_remaining": 0.0, "requests_reset_s": 86400.0}

    def answer(request):
        announces = request.sample.id in {"sample-9", "sample-19", "sample-29", "sample-39"}
        return Reply(text=scored_text(request).text, usage=Usage(100, 20), announced=absurd if announces else {})

    played = Stage(answer=answer, options={"limits": {"a": {"concurrency": 1}}}).play(make_samples(60))
    assert played.all_scored
    assert played.finished_s == pytest.approx(60.0)


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
