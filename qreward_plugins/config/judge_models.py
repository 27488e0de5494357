"""What the nodes below `judges` have in common: every key, its unit and its default, documented beside it.

A kind of judge adds its own keys where it is defined (`qreward_plugins.judges`), in a model that inherits
`JudgeConfig`, or `AskingConfig` if it asks sources.
"""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import AfterValidator, BeforeValidator, Field

from .nodes import Node, Number, SourceName, no_bool, one_or_several


def _ascending(interval: tuple[float, float]) -> tuple[float, float]:
    if interval[0] >= interval[1]:
        raise ValueError(f"the low end {interval[0]:g} must be below the high end {interval[1]:g}")
    return interval


Interval = Annotated[tuple[Number, Number], AfterValidator(_ascending)]
"""The low and the high end of a range."""


class JudgeConfig(Node):
    """What every judge has."""

    kind: str
    """The kind of judge: a name that `qreward kinds` lists, or `package.module:Class`."""


class AskingConfig(JudgeConfig):
    """What every judge has that asks sources."""

    sources: Annotated[tuple[SourceName, ...], BeforeValidator(one_or_several)] = ()
    """Names of the sources that may answer this judge; a glob over names (`local-*`) or, after `model:`, over models
    (`model:Qwen/*`) means all that match and can answer. Default: all that answer what this kind of judge asks for
    (texts of kind `openai` for a judge of kind `llm`, values of kinds `function` and `http` for one of kind
    `function`)."""

    floor: Number | None = None
    """Score of a response that is empty or cannot be judged, and of an invalid verdict with `on_invalid: floor`.
    Default: the low end of the reward range."""

    on_invalid: Literal["missing", "floor"] = "missing"
    """What becomes of a sample whose verdicts were invalid on every try, when the judge answers other samples well.
    `missing` (default): no reward, as after any failure. `floor`: the floor score; choose it when the policy could
    learn to provoke invalid verdicts in order to escape a bad score."""

    invalid_retries: Annotated[int, Field(ge=0, le=10), BeforeValidator(no_bool)] = 1
    """Further tries after an invalid verdict, on another source where there is one. Default: 1."""

    reward_range: Interval | None = None
    """The range of the rewards. Default: any finite number."""

    correct_at: Number | None = None
    """The reward from which a response counts as correct (the metric `acc`). Default: correctness is not defined."""
