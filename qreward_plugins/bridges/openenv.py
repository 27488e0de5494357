"""A rubric for the environments of OpenEnv.

A rubric returns a float (openenv/core/rubrics/base.py), and containers compute with it. None is no value for a missing
reward: `reward or 0.0`, which is usual in clients, would train it as a zero. So this rubric raises, and the step fails.
OpenEnv's own harness refuses a rollout without a reward, too (openenv/core/harness/rollout.py).

    def sample(action, observation):
        return Sample([{"role": "user", "content": observation.metadata["question"]}], action.text)


    class Asking(Environment):
        def __init__(self):
            super().__init__(rubric=QRewardRubric("judges.yaml", sample))

        async def step_async(self, action, timeout_s=None, **kwargs):
            seen = Observation(done=True, metadata={"question": self.question})
            seen.reward = await self._apply_rubric_async(action, seen)
            return seen

        def step(self, action, timeout_s=None, **kwargs):  # OpenEnv calls it in a thread, without an event loop
            return asyncio.run(self.step_async(action))
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from openenv.core.rubrics import Rubric

from ..samples import Sample
from .scorer import ConfigLike, Scorer


class QRewardRubric(Rubric):  # type: ignore[misc]
    """Scores a step of an environment with a configuration, the path of a file or its tree.

    `sample` makes a sample of an action and its observation, whose fields are those of your environment.

    `last_score` is the last reward (of the base class), and `last_components` its components by name; they are those of
    the step before while a step has no reward. Raises `ConfigurationError` with all mistakes.
    """

    def __init__(self, config: ConfigLike, sample: Callable[[Any, Any], Sample]) -> None:
        super().__init__()
        self._scorer = Scorer(config, "OpenEnv")
        self._sample = sample
        self.last_components: dict[str, float] = {}

    async def forward(self, action: Any, observation: Any) -> float:
        """Return the reward. Raises `RewardMissing` for a sample without one, and what `sample` raises. Returns within
        `engine.deadline_s`; cancelling it cancels its attempts.

        It is a coroutine, as that of OpenEnv's `LLMJudge`: await it by `_apply_rubric_async` in `step_async`. A
        container that awaits its children takes it, too.
        """
        number, self.last_components = await self._scorer.score(self._sample(action, observation))
        return number
