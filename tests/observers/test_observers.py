"""What observers are told, in which order, and what statistics, logs and metrics make of it. An observer that raises is
cut off.
"""

from __future__ import annotations

import asyncio
import gc
import random
import sys
from collections import Counter

import pytest

from qreward_plugins import (
    AttemptEnded,
    AttemptStarted,
    Cause,
    ConfigurationError,
    EngineClosed,
    Failed,
    RewardEngine,
    SampleDropped,
    SampleEnded,
    SampleSubmitted,
    Scored,
    Spent,
    TransientError,
    Usage,
    Verdict,
    accelerate,
)
from qreward_plugins.errors import PermanentError, Throttled
from qreward_plugins.observers import FailureLog, events
from qreward_plugins.observers.batch_report import BatchReport, Part
from qreward_plugins.observers.facts import Facts, summary
from qreward_plugins.observers.opentelemetry import OpenTelemetry
from qreward_plugins.simulation import run

from ..kit import Recorder, Stage, in_virtual_time, make_config, make_sample, make_samples, mistakes_of


@pytest.fixture
def recorder():
    return Recorder()


def staged(*, hedge=False, price=None, engine=None, **behaviours):
    behaviours = behaviours or {"a": 1.0}
    engine = {"seed": 1, "deadline_s": 300.0, "scheduling": {"hedge": hedge}, **(engine or {})}
    limits = {name: {"concurrency": 8} for name in behaviours}
    return Stage(behaviours, options={"limits": limits, "source": {"price": price or {}}, "engine": engine})


def scored(stage, samples, *observers):
    return stage.run(lambda engine: engine.score_all(samples), *observers)


def test_a_sample_is_told_from_its_submission_to_its_outcome(recorder):
    async def main(engine):
        return await engine.score_all([make_sample()]), engine.last_batch()

    (outcome,), report = staged(price={"per_request": 0.5}).run(main, recorder)
    kinds = "SampleSubmitted AttemptStarted AttemptEnded CallEnded SampleEnded BatchEnded EngineClosed"
    assert recorder.kinds == kinds.split()
    submitted, started, attempt, call, ended, batch, _ = recorder.events
    assert submitted == SampleSubmitted(0.0, "sample-0", "test/add")
    assert started == AttemptStarted(0.0, 0, 0, "quality", "a", False, 1)
    assert attempt == AttemptEnded(1.0, 0, 0, "quality", "a", "answered", 1.0, Usage(100, 20), 0.5, False, False, "")
    assert (call.judge, call.source, call.reason, call.waited_s, call.attempts) == ("quality", "a", "", 0.0, 1)
    assert ended == SampleEnded(1.0, "sample-0", "test/add", outcome)
    assert ended.outcome.verdict.raw == outcome.verdict.raw is not None
    assert batch.report == report


def test_what_is_told_adds_up_to_the_statistics(recorder):
    rng = random.Random(5)

    def behaviour(number, request, now):
        drawn = rng.random()
        if drawn < 0.1:
            return TransientError("connection reset")
        if drawn < 0.15:
            return Throttled("slow down", retry_after_s=0.5)
        return 50 * drawn if drawn > 0.9 else drawn

    async def main(engine):
        await engine.score_all(make_samples(200))
        return engine

    stage = staged(hedge=True, price={"per_request": 0.01}, a=behaviour, b=behaviour)
    statistics = stage.run(main, recorder).statistics()
    started, ended = recorder.of(AttemptStarted), recorder.of(AttemptEnded)
    assert sorted(event[1:3] for event in started) == sorted(event[1:3] for event in ended)
    assert len(recorder.of(SampleEnded)) == len(recorder.of(SampleSubmitted)) == statistics.submitted == 200
    assert any(event.hedge for event in started)
    assert {"connection reset", "slow down"} <= {event.detail for event in ended}
    for name, source in statistics.sources.items():
        results = Counter(event.result for event in ended if event.source == name)
        assert source.requests == sum(event.source == name for event in started)
        counts = (source.answered, source.throttled, source.transient, source.cancelled)
        assert counts == tuple(results[name] for name in ("answered", "throttled", "failed", "cancelled"))
        assert source.prompt_tokens == 100 * results["answered"]
        assert source.cost_usd == pytest.approx(0.01 * results["answered"])


def test_a_sample_that_nobody_waits_for_any_more_is_dropped(recorder):
    async def main(engine):
        task = asyncio.ensure_future(engine.score(make_sample()))
        await asyncio.sleep(0.5)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)

    staged().run(main, recorder)
    assert [event.sample_id for event in recorder.of(SampleDropped)] == ["sample-0"]
    assert recorder.of(SampleEnded) == []
    assert [event.result for event in recorder.of(AttemptEnded)] == ["cancelled"]


def test_names_and_errors_of_others_are_cut(recorder):
    long = make_sample(id="i" * 5_000, data_source="d" * 5_000)
    scored(staged(a=lambda number, request, now: PermanentError("x" * 50_000)), [long], recorder)
    for event in recorder.of(SampleSubmitted) + recorder.of(SampleEnded):
        assert (len(event.sample_id), len(event.data_source)) == (events.NAME_CHARS, events.NAME_CHARS)
    assert [len(event.detail) for event in recorder.of(AttemptEnded)] == [events.DETAIL_CHARS]


def test_closing_is_the_last_event_and_comes_once(recorder):
    async def main(engine):
        waiting = asyncio.ensure_future(engine.score(make_sample()))
        await asyncio.sleep(1)
        await engine.aclose()
        await engine.aclose()
        return await waiting

    assert staged(a=100.0).run(main, recorder).label == "infra/closed"
    assert recorder.kinds[-1] == "EngineClosed"
    assert len(recorder.of(EngineClosed)) == 1
    assert len(recorder.of(AttemptEnded)) == len(recorder.of(SampleEnded)) == 1


# Observers that break the rules


class Faulty:
    """Raises `error` for every event of `kind`."""

    def __init__(self, kind, error):
        self.kind, self.error, self.calls = kind, error, 0

    def __call__(self, event):
        if type(event).__name__ == self.kind:
            self.calls += 1
            raise self.error


@pytest.mark.parametrize(
    ("kind", "error"),
    [
        ("SampleSubmitted", ValueError("no\nroom")),
        ("EngineClosed", RecursionError()),
    ],
)
def test_an_observer_that_raises_is_cut_off_with_one_warning(recorder, caplog, kind, error):
    faulty = Faulty(kind, error)
    assert scored(staged(), make_samples(20), faulty, recorder) == scored(staged(), make_samples(20))
    assert faulty.calls == 1
    (warning,) = [record for record in caplog.records if record.name == "qreward_plugins.observers"]
    assert warning.levelname == "WARNING"
    assert warning.getMessage().startswith(f"observer Faulty raised {type(error).__name__}")
    assert warning.getMessage().isprintable()
    assert f"({__file__}:" in warning.getMessage()
    assert len(recorder.of(SampleEnded)) == 20  # the other one goes on
    assert recorder.kinds[-1] == "EngineClosed"


def test_an_observer_that_returns_a_coroutine_is_cut_off(caplog):
    async def work(event):
        pass

    scored(staged(), [make_sample()], work)
    gc.collect()
    assert caplog.text.count("returned a coroutine") == 1


def test_what_is_no_observer_is_an_error():
    for observers, said in (
        ([print, 3], r"observers\[1\]: int is no observer"),
        ([Faulty], r"observers\[0\]: Faulty is no observer"),
        (3, r"observers\[0\]: int is no observer"),
    ):
        with pytest.raises(ConfigurationError, match=said):
            RewardEngine(make_config(), observers=observers)


# `observers:` of a configuration: factories by path or by name, and what is said of those that cannot be used


MODULE = """
from qreward_plugins.errors import ConfigurationError, Mistake

told = []


def make():
    return told.append


class Kept:
    def __call__(self, event):
        told.append(event)


def broken():
    raise ValueError("no\\nroom for it")


def lacking():
    raise ConfigurationError([Mistake("observers", "no meter.", "Install one.")])


def nothing(): ...


"""


TREE = make_config("a")


@pytest.fixture
def module(tmp_path, monkeypatch):
    (tmp_path / "watchers.py").write_text(MODULE)
    monkeypatch.syspath_prepend(tmp_path)
    yield "watchers"
    sys.modules.pop("watchers", None)


def told_of(observers):
    async def main():
        async with RewardEngine({**TREE, "observers": observers}):
            pass

    run(main())
    return [type(event).__name__ for event in sys.modules["watchers"].told]


def test_a_factory_is_called_and_what_it_returns_is_told(module, tmp_path):
    (tmp_path / "own.py").write_text(MODULE.replace("told = []", "from watchers import told"))
    named = ["watchers:make", "watchers:Kept", f"{tmp_path / 'own.py'}:make"]
    assert told_of(named) == ["EngineClosed"] * 3
    assert told_of("watchers:make") == ["EngineClosed"] * 4, "one needs no list"


def test_every_mistake_is_told_with_its_place(module):
    names = ["watchers:make", "watchers:mak", "watcher:make", "watchers:broken"]
    names += ["watchers:nothing", "watchers:lacking"]
    said = mistakes_of(RewardEngine, {**TREE, "observers": names})
    assert "watchers has no 'mak'; did you mean 'make'?" in said["observers[1]"]
    assert "there is no module 'watcher'" in said["observers[2]"]
    assert "the factory watchers:broken raised ValueError: no\\nroom for it" in said["observers[3]"]
    assert "returned an object of type NoneType, which cannot be called" in said["observers[4]"]
    assert said["observers"] == "observers: no meter. Install one.", "the factory has said it itself"
    assert len(said) == 5


# A batch's report, the facts of outcomes, and how long short and long requests waited


SCORED = Scored(Verdict(0.5, {"tone": 0.25}, judge="j", source="a", spent=Spent(2, Usage(10, 5), 1.5, 0.01)))
FAILED = Failed(Cause.INFRA, "deadline", judge="j", spent=Spent(3, latency_s=4.0))


PARTS = [
    Part("arrival", "", 3.0),
    Part("queue", "a", 2.0),
    Part("service", "a", 1.0),
    Part("quota", "b", 9.1),
    Part("straggler", "b", 4.0),
    Part("retry", "b", 0.6),
    Part("retry", "b", 0.5),
]


def test_a_report_says_which_part_of_which_source_is_to_blame():
    report = BatchReport(512, 512, 0, 512, 0, 20.2, tuple(PARTS))
    assert report.describe() == (
        "512 samples in 20.2 s; waited 14.2 s on b: 9.1 quota, 4.0 straggler, 1.1 retry; "
        "3.0 s: 3.0 arrival; 3.0 s on a: 2.0 queue, 1.0 service"
    )
    of_a, of_b = {"queue": 2.0, "service": 1.0}, {"quota": 9.1, "straggler": 4.0, "retry": 1.1}
    blame = {"none/arrival": 3.0, **{f"a/{k}": v for k, v in of_a.items()}, **{f"b/{k}": v for k, v in of_b.items()}}
    assert report.metrics() == pytest.approx({f"blame_s/{part}": seconds for part, seconds in blame.items()})


def test_a_summary_counts_all_and_averages_what_was_scored():
    facts = Facts(["tone"], defines_correct=True)
    outcomes = [
        SCORED,
        FAILED,
        Failed(Cause.VERDICT, "invalid"),
        Scored(Verdict(1.0, {"tone": 0.75}, correct=True, source="b")),
    ]
    numbers = summary([facts.of(outcome) for outcome in outcomes])
    assert (numbers["samples"], numbers["failed"], numbers["failed_rate"]) == (4.0, 2.0, 0.5)
    assert [numbers[f"failed/{cause}"] for cause in ("infra", "verdict", "policy")] == [1.0, 1.0, 0.0]
    assert (numbers["source_share/a"], numbers["source_share/b"]) == (0.5, 0.5)
    assert (numbers["score/tone"], numbers["acc"]) == (0.5, 1.0)
    assert (numbers["latency_s/max"], numbers["latency_s/p50"]) == (4.0, 0.0)
    assert (numbers["tokens"], numbers["cost_usd"]) == (15.0, pytest.approx(0.01))
    assert numbers["attempts_mean"] == pytest.approx(1.25)


def test_a_summary_counts_what_a_monitor_took_out_as_screened_and_not_as_failed():
    facts = Facts([], defines_correct=False)
    screened, floor = Failed(Cause.POLICY, "screened", source="a"), Failed(Cause.POLICY, "screened")
    outcomes = [SCORED, FAILED, screened, Scored(Verdict(0.0, basis="floor", failure=floor))]
    numbers = summary([facts.of(outcome, "math") for outcome in outcomes])
    assert (numbers["failed"], numbers["failed_rate"], numbers["data/math/failed_rate"]) == (1.0, 0.25, 0.25)
    assert (numbers["failed/policy"], numbers["screened_rate"], numbers["floor_rate"]) == (0.0, 0.5, 0.25)
    assert (numbers["floor/policy"], numbers["floor/verdict"]) == (1.0, 0.0)
    assert (numbers["reward/mean"], numbers["source_share/a"]) == (0.25, 1.0)


def test_rewards_are_told_with_their_spread_and_by_data_source():
    facts = Facts([], defines_correct=True)
    rows = [facts.of(Scored(Verdict(number / 10, correct=number > 5)), "math") for number in range(11)]
    rows += [facts.of(FAILED, "math"), facts.of(FAILED, "code"), facts.of(SCORED, None)]
    numbers = summary(rows)
    spread = {"mean": 0.5, "std": (sum((n / 10 - 0.5) ** 2 for n in range(11)) / 12) ** 0.5, "min": 0.0, "max": 1.0}
    spread |= {"p10": 0.1, "p50": 0.5, "p90": 0.9}
    assert {name: numbers[f"reward/{name}"] for name in spread} == pytest.approx(spread)
    by_source = {"math/reward": 0.5, "math/failed_rate": 1 / 12, "math/acc": 5 / 11, "code/failed_rate": 1.0}
    found = {name.removeprefix("data/"): value for name, value in numbers.items() if name.startswith("data/")}
    assert found == pytest.approx(by_source)


def test_a_group_is_flat_if_all_its_rewards_are_equal():
    facts = Facts([], defines_correct=False)
    rewards = {"flat": (0.5, 0.5, None), "spread": (0.5, 0.6), "lone": (1.0, None), "down": (None, None)}
    pairs = [(group, reward) for group, those in rewards.items() for reward in those]
    rows = [facts.of(FAILED if reward is None else Scored(Verdict(reward))) for _, reward in pairs]
    assert summary(rows, [group for group, _ in pairs])["flat_rate"] == 0.5
    assert "flat_rate" not in summary(rows)
    assert "flat_rate" not in summary(rows[-4:], "abcc")


# The log of failures: one line a cause, with a count, whatever samples and servers put into it


GONE = Failed(Cause.INFRA, "exhausted", "source 'a' answered 500", judge="j", source="a", spent=Spent(6))


def ended(number, failed, at=0.0):
    return SampleEnded(at, f"sample-{number}", "math", failed)


def test_one_cause_is_one_line_and_then_a_count_once_a_minute(caplog):
    log = FailureLog()
    for number in range(512):
        log.ended(ended(number, GONE, number / 10))
    assert caplog.messages == [
        "sample-0 (math): infra failure (exhausted) after 6 attempts: source 'a' answered 500",
    ]
    log.ended(ended(512, GONE, 61.0))
    assert caplog.messages[1].startswith(
        "512 more samples ended in this way in the last 61 s; the last was sample-512 (math)"
    )
    log.ended(ended(513, GONE, 122.0))
    assert caplog.messages[2].startswith("1 more samples ended")
    # Another cause is told at once.
    log.ended(ended(0, Failed(Cause.INFRA, "deadline", "too late", judge="j", source="a"), 62.0))
    log.ended(ended(0, Failed(Cause.INFRA, "exhausted", "another", judge="j", source="b"), 62.0))
    assert len(caplog.messages) == 5


def test_names_and_details_stay_on_their_line(caplog):
    evil = "x\nERROR all is lost\x1b[31m\u202e\x9b" + "y" * 5000
    FailureLog().ended(SampleEnded(0.0, evil, evil, Failed(Cause.INFRA, "input", evil)))
    (line,) = caplog.messages
    assert line.isprintable()
    assert len(line) < 1300


# OpenTelemetry, against the exporter of its SDK that keeps everything in memory


@in_virtual_time
async def test_attempts_and_calls_are_counted():
    pytest.importorskip("opentelemetry.sdk.metrics")
    from opentelemetry.sdk.metrics import MeterProvider
    from opentelemetry.sdk.metrics.export import InMemoryMetricReader

    reader = InMemoryMetricReader()
    provider = MeterProvider(metric_readers=[reader])
    behaviours = [ConnectionError("secret"), 0.0, 100.0, 2.0]

    async def grade(x):
        behaviour = behaviours.pop(0)
        if isinstance(behaviour, Exception):
            raise behaviour
        await asyncio.sleep(behaviour)
        return x

    graded = accelerate(grade, name="grade", retries=1, hedge=1.0, observers=[OpenTelemetry(provider)])
    assert [await graded(1), await graded(2)] == [1, 2]
    await asyncio.sleep(1)
    found = {}
    for metric in reader.get_metrics_data().resource_metrics[0].scope_metrics[0].metrics:
        for point in metric.data.data_points:
            labels = tuple(str(value) for _, value in sorted(point.attributes.items()))
            found[(metric.name, *labels)] = getattr(point, "value", None) or getattr(point, "sum", 0)
    assert found["qreward.attempts", "grade", "failed", "grade"] == 1
    assert found["qreward.attempts", "grade", "answered", "grade"] == 2
    assert found["qreward.attempts", "grade", "cancelled", "grade"] == 1
    assert found["qreward.calls", "grade", ""] == 2
    assert found["qreward.in_flight", "grade"] == 0
    assert found["qreward.attempt.duration", "grade", "cancelled", "grade"] == pytest.approx(3.0)
    assert "secret" not in str(found)
    provider.shutdown()


def test_without_the_package_it_names_the_extra(monkeypatch):
    monkeypatch.setitem(sys.modules, "opentelemetry", None)
    with pytest.raises(ConfigurationError, match=r'pip install "qreward-plugins\[opentelemetry\]"'):
        OpenTelemetry()
