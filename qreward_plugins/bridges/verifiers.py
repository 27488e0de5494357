"""A reward function for the tasks of verifiers (0.4, its `v1`), which a task names in `rewards` of its configuration.

A reward that raises ends its rollout with an error (verifiers/v1/task.py: `Task.score`): the trace keeps None for the
reward and is not `ok`, so a trainer drops it or tries again. verifiers' own judges do the same, because a reward has no
other value that is not a number.

    # my_quality.py
    quality = reward("judges.yaml")

    # in the configuration of the run
    [env.taskset.task.rewards.quality]
    fn = "my_quality.py:quality"
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any, Literal

from ..adapters import messages_of
from .scorer import ConfigLike, Scorer, sample_of


def reward(
    config: ConfigLike,
    *,
    ground_truth: str = "answer",
    view: Literal["last_reply", "full_trace"] = "last_reply",
    name: str = "qreward",
) -> Callable[..., Awaitable[float]]:
    """Return an async function `(task, trace) -> float` that scores with a configuration, the path of a file or its
    tree. It is what `fn` of a `RewardFunctionConfig` names, and what a method with `@vf.reward` may await.

    `ground_truth` is the field of the task that holds it; a task without the field has none. `data_source` of the task
    selects the judge; all fields are extras. `view` is what the judge sees as the response: the last reply, or the
    transcript. Components become metrics of the trace, `NAME/score/COMPONENT`.

    Raises `ConfigurationError` with all mistakes. The function raises `RewardMissing` for a rollout without a reward.
    It returns within `engine.deadline_s`; cancelling it cancels its attempts.
    """
    scorer = Scorer(config, "verifiers")

    async def score(task: Any, trace: Any) -> float:
        row = task.model_dump()
        system, prompt = row.pop("system_prompt", None), row.pop("prompt", None)
        before: list[Any] = [{"role": "system", "content": system}] if system else []
        response = trace.transcript if view == "full_trace" else trace.last_reply
        known: dict[str, Any] = {"ground_truth": ground_truth, "group_id": trace.task.key, "id": trace.id}
        sample = sample_of(row, lambda: before + messages_of(prompt or ""), response, **known)
        number, components = await scorer.score(sample)
        for component, value in components.items():
            trace.record_metric(f"{name}/score/{component}", value)
        return number

    score.__name__ = score.__qualname__ = name
    return score
