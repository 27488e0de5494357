"""The rubric for OpenEnv: as an environment calls it."""

from __future__ import annotations

import asyncio

import pytest

from qreward_plugins import RewardMissing, Sample


class Rubric:
    """`openenv.core.rubrics.Rubric` 0.10 for an async `forward`, without hooks."""

    last_score = None

    async def __call__(self, action, observation):
        self.last_score = await self.forward(action, observation)
        return self.last_score


STAND_INS = {"openenv": {}, "openenv.core": {}, "openenv.core.rubrics": {"Rubric": Rubric}}


def sample_of(action, observation):
    return Sample([{"role": "user", "content": observation}], action)


def test_a_step_is_scored_or_an_error(imported, seen, tree):
    bridge = imported("openenv", STAND_INS)
    rubric = bridge.QRewardRubric(seen[0], sample_of)
    assert asyncio.run(rubric("It is 42", "How much?")) == 1.0
    assert (rubric.last_score, rubric.last_components) == (1.0, {"words": 3.0})
    rubric = bridge.QRewardRubric(tree, sample_of)
    with pytest.raises(RewardMissing):
        asyncio.run(rubric("so: refuse", "How much?"))
    assert rubric.last_score is None
