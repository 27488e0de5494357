"""A rubric for the environments of OpenEnv.

A rubric returns a float (openenv/core/rubrics/base.py), and containers compute with it. None is no value for a missing
reward: `reward or 0.0`, which is usual in clients, would train it as a zero. So this rubric raises, and the step fails.
OpenEnv's own harness refuses a rollout without a reward, too (openenv/core/harness/rollout.py).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from openenv.core.rubrics import Rubric

from ..samples import Sample
from .scorer import ConfigLike, Scorer


class QRewardRubric(Rubric):  # type: ignore[misc]
    """Scores a step of an environment with a configuration, the path of a file or its tree.

    `sample` makes a sample of an action and its observation, whose fields are those of your environment. Raises
    `ConfigurationError` with all mistakes.
    """

    def __init__(self, config: ConfigLike, sample: Callable[[Any, Any], Sample]) -> None:
        super().__init__()
        self._scorer = Scorer(config, "OpenEnv")
        self._sample = sample
        self.last_components: dict[str, float] = {}
        """The components of the last score, by name."""

    async def forward(self, action: Any, observation: Any) -> float:
        """Return the reward. Raises `RewardMissing` for a sample without one, and what `sample` raises. Returns within
        `engine.deadline_s`; cancelling it cancels its attempts.

        A rubric that awaits belongs into `step_async`. A plain `step`, which OpenEnv calls in a thread, runs it with
        `asyncio.run(self._apply_rubric_async(action, observation))`.
        """
        number, facts = await self._scorer.score(self._sample(action, observation))
        components = {key.removeprefix("score/"): value for key, value in facts.items() if key.startswith("score/")}
        self.last_components = {key: value for key, value in components.items() if value is not None}
        return number
