"""What an engine does about sources that fail: retries, failover, circuits, hedges, limits. In virtual time."""

from __future__ import annotations

import asyncio

import pytest

from qreward_plugins import InvalidReply, PermanentError, SampleRefused, SourceStateChanged, Throttled, TransientError
from qreward_plugins.config import Batch
from qreward_plugins.simulation import SimulatedSource
from qreward_plugins.sources import Reply
from qreward_plugins.testing import JudgeServer

from ..kit import Recorder, Stage, by_word, fails, hangs, make_sample, make_samples, scored_text, wired

CALM = {"engine": {"scheduling": {"hedge": False}, "deadline_s": 300.0}}


@pytest.mark.parametrize(
    ("error", "requests", "scored"),
    [
        (TransientError("503"), 2, True),
        (Throttled("429", retry_after_s=7.0), 2, True),
        (InvalidReply("no verdict"), 2, True),
        (SampleRefused("too long"), 1, False),
        (PermanentError("401"), 1, False),
    ],
    ids=lambda value: type(value).__name__,
)
def test_the_class_of_an_error_decides_whether_it_is_asked_again(error, requests, scored):
    stage = Stage({"a": fails(error, times=1)}, options=CALM)
    played = stage.play(make_samples(1))
    assert (len(stage.sent), played.all_scored) == (requests, scored)


def test_a_source_is_left_alone_for_as_long_as_it_asks():
    stage = Stage({"a": fails(Throttled("429", retry_after_s=7.0), times=1)}, options=CALM)
    assert stage.play(make_samples(1)).all_scored
    assert 7.0 <= stage.sent[1].at <= 8.0
    first, *others = [each.at for each in stage.sent]
    assert first == 0.0
    assert not [at for at in others if at < 7.0]


def test_retries_come_no_faster_than_their_budget():
    """A source that fails everything for a minute gets a trickle, and all samples are scored when it is well."""

    def down(number, request, now):
        return TransientError("503") if now < 60.0 else 1.0

    stage = Stage({"a": down}, options=CALM | {"limits": {"a": {"concurrency": 8}}})
    played = stage.play(make_samples(50))
    assert played.all_scored
    assert sum(each.at < 60.0 for each in stage.sent) <= 70
    assert played.finished_s <= 90.0


def test_another_source_takes_what_one_cannot_answer():
    stage = Stage({"a": fails(TransientError("503")), "b": 1.0}, options=CALM)
    played = stage.play(make_samples(30))
    assert played.all_scored
    assert played.shares == {"b": 30}


def test_a_dead_source_is_not_asked_until_a_probe_is_answered():
    recorder = Recorder()

    def dead_for_a_minute(number, request, now):
        return TransientError("connection refused") if now < 60.0 else 1.0

    stage = Stage(
        {"a": dead_for_a_minute, "b": 1.0},
        options=CALM | {"limits": {"a": {"concurrency": 4}, "b": {"concurrency": 1}}},
    )

    async def main(engine):
        outcomes = await engine.score_all(make_samples(120))
        return [outcome.reward for outcome in outcomes]

    assert stage.run(main, recorder) == [0.5] * 120
    asked = [each.at for each in stage.sent if each.source == "a"]
    assert sum(at < 60.0 for at in asked) <= 64  # four at first, and a probe a second
    assert sum(at >= 60.0 for at in asked) >= 5
    states = [event.state for event in recorder.of(SourceStateChanged) if event.source == "a"]
    assert states[0] == "down"
    assert states[-1] == "up"


def test_a_straggler_is_hedged_and_the_first_answer_counts():
    def straggles(number, request, now):
        return 100.0 if request.sample.id == "sample-0" and now < 5.0 else 1.0

    options = {"engine": {"deadline_s": 300.0}, "limits": {name: {"concurrency": 4} for name in "ab"}}
    stage = Stage({"a": straggles, "b": straggles}, options=options)
    played = stage.play(make_samples(40))
    assert played.all_scored
    assert played.finished_s < 30.0
    hedges = sum(source.hedges for source in played.statistics.sources.values())
    assert 1 <= hedges <= 10

    unhedged = Stage({"a": straggles, "b": straggles}, options=options | CALM).play(make_samples(40))
    assert sum(source.hedges for source in unhedged.statistics.sources.values()) == 0
    assert played.finished_s < unhedged.finished_s


def test_a_batch_is_served_so_that_its_last_sample_ends_early():
    """Longest first over a fast and a slow source; both end at about the same time."""

    def takes(factor):
        return lambda number, request, now: factor * len(request.sample.response) / 10

    stage = Stage(
        {"fast": takes(1.0), "slow": takes(4.0)},
        options={
            "engine": {"scheduling": {"hedge": False}, "deadline_s": 5000.0},
            "limits": {name: {"concurrency": 1} for name in ("fast", "slow")},
            "total_s": 200,
        },
    )
    sizes = [10 + 10 * (number * 7 % 20) for number in range(60)]
    samples = [make_sample(number, response="x" * size) for number, size in enumerate(sizes)]

    async def main(engine):
        times = [0.0]
        for _ in range(2):  # in the first one it gets to know them
            await engine.score_all(samples)
            times.append(asyncio.get_running_loop().time())
        return times[2] - times[1]

    took_s = stage.run(main)
    assert took_s <= 1.01 * sum(sizes) / 10 / 1.25


def test_a_call_of_a_higher_priority_goes_first():
    stage = Stage({"a": 1.0}, options=CALM | {"limits": {"a": {"concurrency": 1}}})

    async def main(engine):
        batch = asyncio.ensure_future(engine.score_all(make_samples(10)))
        await asyncio.sleep(2.5)
        await engine.score(make_sample(99), priority=1)
        at = asyncio.get_running_loop().time()
        await batch
        return at

    assert stage.run(main) == 4.0


def test_a_batch_of_calls_goes_in_one_request_and_a_bad_one_is_asked_again_alone():
    tree = {
        "sources": {"rm": {"kind": "http", "url": "http://rm.invalid/", "batch": {"max_size": 8}, "version": "1"}},
        "judges": {"right": {"kind": "function"}},
        "engine": {"seed": 7, "deadline_s": 100.0},
    }

    def answered(replies):
        return [InvalidReply("no number") if reply.value == 3.0 else reply for reply in replies]

    def value(request):
        return Reply(value=float(request.sample.id.removeprefix("sample-")))

    source = SimulatedSource("rm", answer=value, batch=Batch(max_size=8), results=answered)
    played = Stage({"rm": source}, tree=tree).play(make_samples(16))
    assert played.rewards == [float(number) for number in range(16)]
    assert max(source.carried) == 8
    assert len(source.carried) <= 6


def test_connections_are_kept_and_used_again():
    with JudgeServer(by_word) as server:
        played = wired({"a": server}, make_samples(60, response="5"), limits={"a": {"concurrency": 4}})
        report = server.report()
    assert played.rewards == [0.5] * 60
    assert report.requests == 60
    assert report.connections <= 4


def test_a_source_that_hangs_costs_no_sample_its_score():
    played = Stage({"a": hangs, "b": 1.0}, answer=scored_text).play(make_samples(40))
    assert played.all_scored
    assert played.finished_s < 100.0
