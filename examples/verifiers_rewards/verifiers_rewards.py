"""The rewards of a task of `verifiers` (0.4, its `v1`) as a reward function: see the README beside it."""

from __future__ import annotations

import inspect
from importlib import import_module
from typing import Any

import verifiers.v1 as vf

from qreward_plugins import Sample


async def rewards(sample: Sample, *, task: str) -> dict[str, float]:
    """Score a sample by the `@vf.reward`s and `@vf.metric`s of `task`, a class (`package.module:Task`).

    The data of the task are the prompt, the ground truth as `answer`, and the columns of the data set that it names.
    Raises what a reward raises, so the sample fails, and ValueError for a reward that needs a runtime.
    """
    module, _, name = task.partition(":")
    kind: Any = getattr(import_module(module), name)
    row = {"answer": sample.ground_truth, **sample.extras, "prompt": [dict(turn) for turn in sample.messages]}
    model = kind.data_type()
    judged = kind(model(**{key: value for key, value in row.items() if key in model.model_fields}))
    for function in judged.hooks("reward"):
        runtime = inspect.signature(function).parameters.get("runtime")
        if runtime is not None and runtime.default is inspect.Parameter.empty:
            raise ValueError(f"the reward {function.__name__} needs a runtime, and a finished response has none")
    turns = [*judged.data.prompt, vf.AssistantMessage(content=sample.response)]
    trace: Any = vf.Trace(
        task=vf.TraceTask(type=name, data=judged.data),
        agent=vf.AgentInfo(config=vf.AgentConfig()),
        nodes=[
            vf.MessageNode(parent=number - 1 if number else None, message=turn, sampled=number == len(turns) - 1)
            for number, turn in enumerate(turns)
        ],
    )
    await judged.score(trace)
    return {"score": trace.reward, **trace.metrics, **{key: each.value for key, each in trace.rewards.items()}}
