"""A judge that is down for a minute and answers one request in ten with prose, beside a reward function that hangs for
one response in fifty: in all of verl's trainers, only the responses that hang lose their reward.
"""

from __future__ import annotations

import math
import warnings

import pytest

from .agreement import NEEDS_VERL
from .runs import BAD_MINUTE, GROUP, MINUTE_S, PROMPTS, STEPS, TRAINERS, BadMinute, train

pytestmark = NEEDS_VERL


@pytest.fixture(scope="module", params=TRAINERS)
def outcome(request, tmp_path_factory, verl_and_tasks):
    with warnings.catch_warnings():
        warnings.simplefilter("default")
        out = tmp_path_factory.mktemp(request.param)
        return train(out, request.param, judge=BadMinute, configuration=BAD_MINUTE)


def test_every_step_was_trained(outcome):
    assert len(outcome.rows) == STEPS * PROMPTS * GROUP
    assert all(math.isfinite(advantage) for row in outcome.rows for advantage in row["advantages"])


def test_only_samples_that_hang_the_function_lose_their_reward(outcome):
    lost = [row for row in outcome.rows if row["missing"]]
    in_validation = outcome.failed("infra", split="val")
    assert 0 < outcome.hung <= 2 * (len(lost) + in_validation), "each is tried twice at most"
    assert len(lost) + in_validation <= outcome.hung, "nobody else is lost"
    assert {row["cause"] for row in lost} <= {"infra/hung"}
    assert all(set(row["advantages"]) == {0.0} for row in lost), "they are neutral to their groups"
    assert len(lost) == outcome.failed("infra"), "what was scored was trained"
    for cause in ("verdict", "policy"):
        assert outcome.failed(cause) == outcome.failed(cause, split="val") == 0
    for dump in outcome.validations:
        assert {row["qreward/cause"] for row in dump if row["qreward/missing"]} <= {"infra/hung"}


def test_the_minute_was_waited_for_once(outcome):
    took = sorted(metrics["timing_s/step"] for metrics in outcome.metrics.values() if "timing_s/step" in metrics)
    assert len(took) >= STEPS - 1, "of one step, the fully asynchronous trainer writes no line"
    # The fully asynchronous trainer generates ahead: the minute has begun when its step does.
    assert MINUTE_S - 5 < took[-1] < MINUTE_S + 30
    assert took[-2] < MINUTE_S / 2, "the judge was used as soon as it was back"
