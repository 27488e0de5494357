"""The soak can fail: each mutation of the production code breaks a promise within a few seeds, and the soak says which.

A checker that has never found anything may be blind. Every mutation here is a mistake that somebody could make.
"""

from __future__ import annotations

import asyncio
import math
import random
from dataclasses import replace

import pytest

from qreward_plugins.engine import RewardEngine
from qreward_plugins.engine.scoring import Scoring
from qreward_plugins.errors import InvalidReply
from qreward_plugins.judges.llm import LLMJudge
from qreward_plugins.observers import SampleEnded
from qreward_plugins.quotas.pace import Pace
from qreward_plugins.quotas.quota import Quota
from qreward_plugins.quotas.reservation import Reservation
from qreward_plugins.quotas.window_limit import WindowLimit
from qreward_plugins.samples import Sample, Scored, Verdict
from qreward_plugins.scheduling import Answer, Batch, Breaker, Dispatcher, Job, Upstream, batches
from qreward_plugins.scheduling.attempts import Attempt
from qreward_plugins.scheduling.planner import Planner
from qreward_plugins.scheduling.timers import Alarms
from qreward_plugins.simulation import Server, trial_player
from qreward_plugins.simulation.promises import broken_promises
from qreward_plugins.simulation.scenarios import JUDGE
from qreward_plugins.simulation.soak import check, soak
from qreward_plugins.simulation.trial import Call, Step, Trial


def around(monkeypatch, owner, name, wrap):
    """Replace a method by `wrap(original)`."""
    monkeypatch.setattr(owner, name, wrap(getattr(owner, name)))


def quota_without(part):
    def mutate(monkeypatch):
        def wrap(wait_s):
            def mutated(self, tokens, now, **joins):
                name = part if part == "concurrency" else f"_{part}"
                kept = getattr(self, name)
                setattr(self, name, math.inf if part == "concurrency" else WindowLimit(part))
                try:
                    return wait_s(self, tokens, now, **joins)
                finally:
                    setattr(self, name, kept)

            return mutated

        around(monkeypatch, Quota, "wait_s", wrap)

    mutate.__name__ = f"quota_without_{part}"
    return mutate


def no_pacing(monkeypatch):
    monkeypatch.setattr(Pace, "wait_s", lambda self, now, held: 0.0)


def no_deadline(monkeypatch):
    monkeypatch.setattr(Dispatcher, "expire", lambda self, job: None)


def no_cutoff(monkeypatch):
    monkeypatch.setattr(Batch, "over", lambda self, now: False)


def cutoff_without_quorum(monkeypatch):
    monkeypatch.setattr(
        Batch, "over", lambda self, now: self.cutoff is not None and now >= self.started_at + self.cutoff.after_s
    )


def outcomes_out_of_order(monkeypatch):
    def wrap(score_all):
        async def mutated(self, samples, **settings):
            return (await score_all(self, samples, **settings))[::-1]

        return mutated

    around(monkeypatch, RewardEngine, "score_all", wrap)


def one_outcome_counted_twice(monkeypatch):
    def wrap(emit):
        def mutated(self, event, *told):
            for _ in range(1 + (event is SampleEnded)):
                emit(self, event, *told)

        return mutated

    around(monkeypatch, Scoring, "emit", wrap)


def an_outcome_is_lost(monkeypatch):
    def wrap(finish):
        def mutated(self, job, outcome, now):
            if not isinstance(outcome, Answer) or job.sequence % 10:
                finish(self, job, outcome, now)

        return mutated

    around(monkeypatch, Dispatcher, "finish", wrap)


def a_default_for_invalid_verdicts(monkeypatch):
    def wrap(verdict):
        def mutated(self, request, reply):
            try:
                return verdict(self, request, reply)
            except InvalidReply:
                return Verdict(0.5)

        return mutated

    around(monkeypatch, LLMJudge, "verdict", wrap)


def a_late_answer_changes_the_outcome(monkeypatch):
    def wrap(emit):
        def mutated(self, event, sample, *told):
            emit(self, event, sample, *told)
            if event is SampleEnded and isinstance(told[0], Scored):
                loop = asyncio.get_running_loop()
                loop.call_later(0.5, object.__setattr__, told[0].verdict, "rationale", "on second thoughts")

        return mutated

    around(monkeypatch, Scoring, "emit", wrap)


def endless_attempts(monkeypatch):
    def wrap(make):
        def mutated(self, *given, max_attempts, **settings):
            make(self, *given, max_attempts=100, **settings)

        return mutated

    around(monkeypatch, Dispatcher, "__init__", wrap)


def hedges_without_budget(monkeypatch):
    monkeypatch.setattr(Batch, "hedges", property(lambda self: 0, lambda self, value: None), raising=False)
    monkeypatch.setattr(Batch, "soft_hedges", property(lambda self: 0, lambda self, value: None), raising=False)


def losers_go_on(monkeypatch):
    monkeypatch.setattr(Attempt, "cancel", lambda self: None)


def nothing_given_back(monkeypatch):
    monkeypatch.setattr(Reservation, "release", lambda self, now, **settled: None)


def time_limits_outlive_their_attempts(monkeypatch):
    monkeypatch.setattr(Alarms, "clear", lambda self: None)


def closing_does_nothing(monkeypatch):
    async def mutated(self):
        await asyncio.sleep(0)

    monkeypatch.setattr(Dispatcher, "close", lambda self: None)
    monkeypatch.setattr(Dispatcher, "aclose", mutated)


def a_probe_is_never_given_back(monkeypatch):
    monkeypatch.setattr(Breaker, "abandoned", lambda self, *, probe: None)


def nobody_wakes_up(monkeypatch):
    def wrap(placements):
        def mutated(self, now, **given):
            yield from placements(self, now, **given)
            self.wake_at = math.inf

        return mutated

    around(monkeypatch, Planner, "placements", wrap)


def a_busy_loop(monkeypatch):
    def wrap(placements):
        def mutated(self, now, **given):
            yield from placements(self, now, **given)
            self.wake_at = now

        return mutated

    around(monkeypatch, Planner, "placements", wrap)
    monkeypatch.setattr(trial_player, "MOST_STEPS", 20_000)


def a_pause_without_end(monkeypatch):
    def wrap(throttled):
        def mutated(self, retry_after_s, sent_at, now, **more):
            throttled(self, retry_after_s, sent_at, now, **more)
            self.pauses.paused_elsewhere(math.inf, now)
            self.pauses._probe_at = math.inf

        return mutated

    around(monkeypatch, Upstream, "throttled", wrap)


def dice_without_a_seed(monkeypatch):
    def wrap(make):
        def mutated(self, *given, rng, **settings):
            make(self, *given, rng=random.SystemRandom(), **settings)

        return mutated

    around(monkeypatch, Dispatcher, "__init__", wrap)


def blame_forgets_a_part(monkeypatch):
    def wrap(report):
        def mutated(batch, upstreams):
            made = report(batch, upstreams)
            return replace(made, parts=made.parts[:-1])

        return mutated

    around(monkeypatch, batches, "report", wrap)


def priorities_do_not_matter(monkeypatch):
    rank = Job.rank.fget
    monkeypatch.setattr(Job, "rank", property(lambda self: rank(self)._replace(priority=0)))


MUTATIONS = [
    (no_deadline, "P1", "was due at", range(40)),
    (no_cutoff, "P1", "its batch was to be cut off", range(150)),
    (cutoff_without_quorum, "P1", "before its batch's quorum was in", range(150)),
    (one_outcome_counted_twice, "P1", "there are more outcomes", range(10)),
    (outcomes_out_of_order, "P2", "the server gave", range(10)),
    (a_default_for_invalid_verdicts, "P2", "the server gave", range(30)),
    (quota_without("requests"), "P3", "over its requests", range(150)),
    (quota_without("tokens"), "P3", "over its tokens", range(150)),
    (quota_without("concurrency"), "P3", "requests were in flight", range(30)),
    (no_pacing, "P3", "was overdrawn", range(150)),
    (hedges_without_budget, "P4", "was hedged", range(150)),
    (nothing_given_back, "P5", "requests in flight", range(10)),
    (time_limits_outlive_their_attempts, "P5", "a timer of", range(10)),
    (closing_does_nothing, "P5", "after closing", range(60)),
    (losers_go_on, "P6", "was under way until", range(60)),
    (a_late_answer_changes_the_outcome, "P6", "has become", range(30)),
    (an_outcome_is_lost, "P6", "gave", range(40)),
    (a_probe_is_never_given_back, "liveness", "waits for a probe", range(200)),
    (nobody_wakes_up, "liveness", "nothing was under way", range(60)),
    (a_busy_loop, "liveness", "busy loop", range(20)),
    (a_pause_without_end, "liveness", "to wait for inf", range(60)),
    (dice_without_a_seed, "P7", "became", range(60)),
    (priorities_do_not_matter, "higher priorities", "waited since", range(24, 60)),
    (blame_forgets_a_part, "blame", "add up to", range(10)),
]
"""What was done to the code, which promise that breaks, words of the finding, and seeds that suffice."""


def finding(promise, words, seeds):
    return next(
        (
            seed
            for seed in seeds
            for broken in check(seed, replay=promise == "P7")[2]
            if broken.promise.startswith(promise) and words in broken.what
        ),
        None,
    )


@pytest.mark.parametrize(
    ("mutate", "promise", "words", "seeds"), MUTATIONS, ids=[mutation[0].__name__ for mutation in MUTATIONS]
)
def test_the_soak_finds(monkeypatch, mutate, promise, words, seeds):
    with monkeypatch.context() as patch:
        mutate(patch)
        seed = finding(promise, words, seeds)
    assert seed is not None, f"no seed in {seeds} shows it"
    assert finding(promise, words, [seed]) is None, "the code does it without the mutation"


def test_more_attempts_than_configured_are_found(monkeypatch):
    """Few random trials fail so often."""
    server = Server("s0", error_share=0.9, seconds_per_unit=0.01, overhead_s=0.0)
    judge = {**JUDGE, "sources": ["s0"], "invalid_retries": 0, "reward_range": [0, 1], "on_invalid": "missing"}
    engine = {"seed": 0, "deadline_s": 600.0, "max_attempts": 1}
    engine["scheduling"] = {"hedge": False, "prefer": "speed"}
    config = {"sources": {"s0": server.source()}, "judges": {"j0": judge}, "routes": {}, "engine": engine}
    samples = tuple(
        Sample([{"role": "user", "content": "?"}], "xx", extras={"work": 1.0}, id=str(n)) for n in range(40)
    )
    trial = Trial(0, (server,), config, (Step(0.0, (Call("batch", samples),)),))
    assert broken_promises(trial, trial_player.play(trial)) == []
    endless_attempts(monkeypatch)
    (broken,) = broken_promises(trial, trial_player.play(trial))
    assert (broken.promise[:2], "requests were sent" in broken.what) == ("P4", True)


def test_a_finding_says_what_happened_and_how_to_see_it_again(monkeypatch):
    monkeypatch.setattr(Dispatcher, "expire", lambda self, job: None)
    soaked = soak(0, 3)
    assert soaked.findings
    seed = next(iter(soaked.findings))
    said = soaked.describe(most=1)
    assert f"seed {seed} broke P1 one outcome by the deadline: " in said
    assert f"python -m qreward_plugins.simulation --seed {seed}" in said
    assert f"trial {seed}\n  Server(name='s0'" in said
    assert "was due at" in said


def test_a_trial_that_cannot_be_played_is_a_finding(monkeypatch):
    def broken(self, *given, **settings):
        raise RuntimeError("out of order")

    monkeypatch.setattr(RewardEngine, "__init__", broken)
    soaked = soak(0, 2)
    assert list(soaked.findings) == [0, 1]
    assert "RuntimeError('out of order') in broken" in soaked.describe()
