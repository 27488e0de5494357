"""The promises of the scheduler, over random sources that fail at random: one outcome each, in time, and no limit
broken.
"""

from __future__ import annotations

import asyncio
import random

from hypothesis import given, settings
from hypothesis import strategies as st

from qreward_plugins.errors import PermanentError, SourceUnusable, Throttled, TransientError
from qreward_plugins.samples import Cause, Failed, Scored
from qreward_plugins.samples.spent import Usage
from qreward_plugins.simulation import run
from qreward_plugins.sources.base import Reply

sources = st.fixed_dictionaries(
    {
        "requests": st.one_of(st.none(), st.integers(1, 40)),
        "tokens": st.one_of(st.none(), st.integers(500, 5000)),
        "concurrency": st.one_of(st.none(), st.integers(1, 20)),
        "seconds": st.floats(0.01, 40),
        "transient": st.floats(0, 1),
        "throttle": st.floats(0, 0.5),
        "hang": st.floats(0, 0.3),
        "reject": st.floats(0, 0.3),
        "garbage": st.floats(0, 1),
        "unusable_after": st.one_of(st.none(), st.integers(0, 40)),
        "seed": st.integers(0, 2**32),
    }
)


def behaviour_of(spec):
    rng = random.Random(spec["seed"])

    def behaviour(number, request, now):
        if spec["unusable_after"] is not None and number >= spec["unusable_after"]:
            return SourceUnusable("401", status=401)
        draw = rng.random()
        for rate, made in (
            (spec["transient"], lambda: TransientError("reset")),
            (spec["throttle"], lambda: Throttled("429", retry_after_s=rng.choice([None, 0.0, 3.0, 20.0]))),
            (spec["reject"], lambda: PermanentError("422")),
            (spec["hang"], lambda: 1e9),
        ):
            if draw < rate / 3:
                return made()
            draw -= rate / 3
        return spec["seconds"] * rng.lognormvariate(0, 0.5)

    return behaviour


@settings(max_examples=150, deadline=None)
@given(
    specs=st.lists(sources, min_size=1, max_size=4),
    sizes=st.lists(st.integers(0, 600), max_size=60),
    cancelled=st.sets(st.integers(0, 59), max_size=10),
    deadline=st.floats(1, 400),
)
def test_every_sample_gets_one_outcome_in_time_and_no_limit_is_broken(new_stage, specs, sizes, cancelled, deadline):
    stage = new_stage()
    for index, spec in enumerate(specs):
        limits = {
            "requests_per_minute": spec["requests"],
            "tokens_per_minute": spec["tokens"],
            "concurrency": spec["concurrency"],
        }
        rng = random.Random(spec["seed"] + 1)
        stage.add(
            f"s{index}",
            timeout_s=60,
            limits={key: value for key, value in limits.items() if value is not None},
            requests_per_window=spec["requests"] or float("inf"),
            tokens_per_window=spec["tokens"] or float("inf"),
            concurrency=spec["concurrency"] or float("inf"),
            behaviour=behaviour_of(spec),
            answer=lambda request, rng=rng, spec=spec: Reply(
                text="bad" if rng.random() < spec["garbage"] / 2 else "1",
                usage=Usage(len(request.sample.response) // 3, 20),
            ),
        )
    stage.judge.completion_tokens = 30

    async def main():
        dispatcher = stage.dispatcher()
        started = dispatcher.now()
        futures = [dispatcher.score(stage.sample(size), stage.judge, deadline_s=deadline) for size in sizes]
        doomed = [index for index in sorted(cancelled) if index < len(futures)]

        async def cancel():
            for index in doomed:
                await asyncio.sleep(deadline / 20)
                futures[index].cancel()

        await asyncio.gather(cancel(), *futures, return_exceptions=True)
        assert dispatcher.now() - started <= max(deadline, len(doomed) * deadline / 20) + 1e-6
        await dispatcher.aclose()
        assert asyncio.all_tasks() == {asyncio.current_task()}
        return futures

    futures = run(main())
    for future in futures:
        if not future.cancelled():
            outcome = future.result()
            assert isinstance(outcome, Scored | Failed)
            assert not isinstance(outcome, Failed) or outcome.cause in (Cause.INFRA, Cause.VERDICT)
    assert stage.idle()
    for source in stage.sources.values():
        assert source.violations == []
