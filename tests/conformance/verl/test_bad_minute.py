"""A judge that is down for a minute and answers one request in ten with prose, beside a reward function that hangs for
one response in fifty: in all of verl's trainers, only the responses that hang lose their reward.
"""

from __future__ import annotations

import math
import threading
import warnings

import pytest

from qreward_plugins.testing import Faults, JudgeServer

from .trainings import EXPERIMENTAL, NEEDS_VERL, prepared, recipe, train

pytestmark = NEEDS_VERL

STEPS, PROMPTS, GROUP, HELD_OUT = 7, 8, 4, 16
DOWN_S = 60.0
DOWN_AT = HELD_OUT + 70
"""The request in the middle of which the judge goes down. No request after it needs the number of any other."""
CONFIGURATION = """
sources:
  only: {kind: openai, base_url: "${oc.env:JUDGE_URL}", model: judge}
  rules:
    kind: function
    function: verl_hanging:score
    kwargs: {every: 50}
    timeouts: {total_s: 2}
judges:
  sums: {kind: llm, instructions: "Is the answer right?"}
  length: {kind: function, sources: [rules]}
  both: {kind: sum, weights: {sums: 0.9, length: 0.1}}
engine: {seed: 0}
"""
"""Every default, but for the time after which a call of the function is killed."""


@pytest.fixture(scope="module", params=["v1", "legacy", *EXPERIMENTAL])
def played(request, tmp_path_factory):
    """What came of a training, and how many calls of the function hung."""
    folder, trainer = tmp_path_factory.mktemp(request.param), request.param
    hung, ending, outages = folder / "hung.txt", threading.Event(), []

    def away():
        server.stop()
        ending.wait(DOWN_S)
        server.start()

    def fault(number):
        if number != DOWN_AT:
            return "prose" if number % 10 == 3 else None
        outages.append(threading.Thread(target=away))
        outages[0].start()
        return "hang"

    with warnings.catch_warnings(), JudgeServer(recipe().scorer.score, faults=Faults(script=fault)) as server:
        warnings.simplefilter("default")
        try:
            outcome = train(
                prepared(folder, learning_steps=20, habit_steps=5, val_questions=HELD_OUT),
                folder,
                CONFIGURATION,
                *([] if trainer in EXPERIMENTAL else [f"trainer.use_v1={trainer == 'v1'}"]),
                steps=STEPS,
                trainer=trainer if trainer in EXPERIMENTAL else "",
                JUDGE_URL=server.base_url,
                VERL_HUNG=str(hung),
            )
        finally:
            ending.set()
            for outage in outages:
                outage.join()
    assert outcome.error == ""
    for text in ("ConfigurationError", "Traceback"):
        assert text not in outcome.log, "nothing of this verl was missed"
    return outcome, len(hung.read_text().splitlines())


def test_every_step_was_trained(played):
    outcome, _ = played
    assert len(outcome.rows) == STEPS * PROMPTS * GROUP
    assert all(math.isfinite(advantage) for row in outcome.rows for advantage in row["advantages"])
    assert all(map(math.isfinite, outcome.told("actor/grad_norm")))


def test_only_samples_that_hang_the_function_lose_their_reward(played):
    outcome, hung = played
    lost = [row for row in outcome.rows if row["info"]["qreward/missing"]]
    in_validation = sum(outcome.told("qreward/val/failed/infra"))
    assert 0 < hung <= 2 * (len(lost) + in_validation), "each is tried twice at most"
    assert len(lost) + in_validation <= hung, "nobody else is lost"
    assert {row["info"]["qreward/cause"] for row in lost} <= {"infra/hung"}
    assert all(set(row["advantages"]) == {0.0} for row in lost), "they are neutral to their groups"
    assert len(lost) == sum(outcome.told("qreward/failed/infra")), "what was scored was trained"
    for cause in ("verdict", "policy", "val/verdict", "val/policy"):
        assert sum(outcome.told(f"qreward/failed/{cause}".replace("failed/val", "val/failed"))) == 0


def test_the_minute_was_waited_for_once(played):
    took = sorted(played[0].told("timing_s/step"))
    assert len(took) >= STEPS - 1, "of one step, the fully asynchronous trainer writes no line"
    # The fully asynchronous trainer generates ahead: the minute has begun when its step does.
    assert DOWN_S - 5 < took[-1] < DOWN_S + 30
    assert took[-2] < DOWN_S / 2, "the judge was used as soon as it was back"
