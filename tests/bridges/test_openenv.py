"""The rubric for OpenEnv: as an environment calls it, and in OpenEnv's own classes where it is installed."""

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


@pytest.mark.filterwarnings("ignore")
def test_in_openenv(tree, written, block):
    pytest.importorskip("openenv.core.rubrics")
    from openenv.core.env_server import Action, Environment, Observation, State
    from openenv.core.rubrics import WeightedSum

    class Answer(Action):
        text: str

    class Asking(Environment):
        def reset(self, seed=None, episode_id=None, **kwargs):
            return Observation()

        def step(self, action, timeout_s=None, **kwargs):
            return asyncio.run(self.step_async(action))

        async def step_async(self, action, timeout_s=None, **kwargs):
            seen = Observation(done=True, metadata={"question": "How much?"})
            seen.reward = await self._apply_rubric_async(action, seen)
            return seen

        @property
        def state(self):
            return State()

    written(tree)
    page = {}
    exec(block("OpenEnv", "py"), page)
    quality = page["rubric"]
    environment = Asking(rubric=WeightedSum([quality], weights=[1.0]))
    assert environment.step(Answer(text="so: 0.25")).reward == quality.last_score == 0.25
    with pytest.raises(RewardMissing):
        environment.step(Answer(text="so: refuse"))
