"""Defines the configuration keys that all judges share, and those for images, each with its unit and its default.

A kind of judge (in `qreward_plugins.judges`) adds its own keys in a model that inherits `JudgeConfig`, or
`AskingConfig` if it asks sources.
"""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import AfterValidator, BeforeValidator, Field

from .nodes import Flag, Node, Number, PositiveInt, Priority, SourceName, no_bool, one_or_several, takes


def _ascending(interval: tuple[float, float]) -> tuple[float, float]:
    if interval[0] >= interval[1]:
        raise ValueError(f"the low end {interval[0]:g} must be below the high end {interval[1]:g}")
    return interval


Interval = Annotated[
    tuple[Number, Number], AfterValidator(_ascending), takes("a list of two numbers, the low and the high end")
]
"""The low and the high end of a range."""


class JudgeConfig(Node):
    """The keys of every judge."""

    kind: str
    """The kind of judge: a name that `qreward check --kinds` lists, or `package.module:Class`."""

    priority: Priority | None = None
    """Priority of the samples that go to this judge, if their route sets none: `high`, `normal`, `low`, or a whole
    number. Parts of a judge go by the priority of the whole. Default: that of the split (`engine.priority`)."""


class AskingConfig(JudgeConfig):
    """The keys of every judge that asks sources."""

    sources: Annotated[tuple[SourceName, ...], BeforeValidator(one_or_several)] = ()
    """Names of the sources that may answer this judge. A glob over names (`local-*`) or over models (`model:Qwen/*`)
    selects all matching sources that can answer. Default: all sources that give what its kind asks for."""

    floor: Number | None = None
    """Score of a response that is empty or cannot be judged, and of an invalid verdict with `on_invalid: floor`.
    Default: the low end of the reward range."""

    on_invalid: Literal["missing", "floor"] = "missing"
    """What happens to a sample whose verdicts are invalid on every try, while the judge answers other samples well.
    `missing` (default): no reward, as after any failure. `floor`: the floor score; choose it if the policy could learn
    to provoke invalid verdicts in order to avoid a bad score."""

    invalid_retries: Annotated[int, Field(ge=0, le=10), BeforeValidator(no_bool)] = 1
    """Further tries after an invalid verdict, on another source if there is one. Default: 1."""

    reward_range: Interval | None = None
    """The range of the rewards. Default: any finite number."""

    correct_at: Number | None = None
    """The reward from which a response counts as correct (the metric `acc`). Default: correctness is not defined."""


class ImageLimits(Node):
    """What is sent of the images of a sample."""

    max_count: PositiveInt = 16
    """Most images of a sample, those of the prompt and of the response together. A sample with more fails. Default:
    16."""

    max_side: Annotated[int, Field(ge=16), BeforeValidator(no_bool)] = 2048
    """Longest side in pixels. A larger image is scaled down to it. Default: 2048."""

    max_bytes: PositiveInt = 5_242_880
    """Largest image in bytes, as it is sent, without the third that base64 adds. If an image is larger after it was
    scaled down, its sample fails. Default: 5,242,880 (5 MiB)."""

    folder: Annotated[str, Field(min_length=1)] | None = None
    """Folder of the images whose paths stand in prompts; a path that leads out of it is refused. Default: none, and a
    sample with a path fails."""

    allow_urls: Flag = False
    """Whether http and https URLs of images are passed on to the server, which then fetches them. A prompt from others
    can make the server call any address in its network. Such answers are not used again from a journal. Default:
    false, and a sample with such a URL fails. URLs are never fetched here."""
