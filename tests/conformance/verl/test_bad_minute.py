"""A judge that is down for a minute and answers one request in ten with prose, beside a reward function that hangs for
one response in fifty: in both of verl's trainers, only the responses that hang lose their reward.
"""

from __future__ import annotations

import math
import os
import warnings

import pytest

from .runs import BAD_MINUTE, GROUP, MINUTE_S, PROMPTS, STEPS, BadMinute, train

pytestmark = [
    pytest.mark.trainer,
    pytest.mark.skipif(not os.environ.get("QREWARD_VERL"), reason="set QREWARD_VERL=1 to train with the real verl"),
]


@pytest.fixture(scope="module", params=["v1", "legacy"])
def outcome(request, tmp_path_factory):
    pytest.importorskip("verl", reason="verl is not installed (pip install 'qreward-plugins[demo]')")
    pytest.importorskip("reasoning_gym", reason="reasoning-gym is not installed (pip install 'qreward-plugins[demo]')")
    with warnings.catch_warnings():
        warnings.simplefilter("default")
        out = tmp_path_factory.mktemp(request.param)
        return train(out, f"trainer.use_v1={request.param == 'v1'}", judge=BadMinute, configuration=BAD_MINUTE)


def test_every_step_was_trained(outcome):
    assert len(outcome.rows) == STEPS * PROMPTS * GROUP
    assert all(math.isfinite(advantage) for row in outcome.rows for advantage in row["advantages"])


def test_only_samples_that_hang_the_function_lose_their_reward(outcome):
    lost = [row for row in outcome.rows if row["missing"]]
    lost += [row for dump in outcome.validations for row in dump if row["qreward/missing"]]
    assert 0 < outcome.hung <= 2 * len(lost), "each is tried twice at most"
    assert len(lost) <= outcome.hung, "nobody else is lost"
    causes = {row.get("cause", row.get("qreward/cause")) for row in lost}
    assert causes == {"infra/hung"}


def test_the_minute_was_waited_for_once(outcome):
    took = sorted(outcome.metrics[step]["timing_s/step"] for step in range(1, STEPS + 1))
    assert MINUTE_S < took[-1] < MINUTE_S + 30
    assert took[-2] < MINUTE_S / 2, "the judge was used as soon as it was back"
