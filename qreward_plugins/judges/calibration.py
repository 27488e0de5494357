"""Maps the score of a reward model to a reward, by the steps of `transform`; and its reference scores: the file that
`qreward calibrate` writes and the step `zscore` reads.

Mean and standard deviation belong to one model and one way to ask it. So the file holds the identity of what was asked,
and a judge refuses the file of another model, template or label.
"""

from __future__ import annotations

import hashlib
import math
import os
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from statistics import fmean, pstdev, quantiles
from typing import Annotated, Any, Final, Literal

from pydantic import AfterValidator, BaseModel, BeforeValidator, Field, model_validator

from ..config.judge_models import Interval
from ..config.nodes import Node, Number, takes
from ..errors import ConfigurationError, InputError, Mistake
from ..samples import Sample
from ..sources.base import Request
from ..system.output_files import check_writable

_KIND: Final = "qreward calibration 1"
_PERCENT = (0, 1, 5, 25, 50, 75, 95, 99, 100)
"""The quantiles in a file. 0 and 100 are the lowest and the highest score."""
FEWEST = 2
REMEDY = "Measure with: qreward calibrate CONFIG SAMPLES."

_MESSAGES: Any = ({"role": "user", "content": "What is 17 plus 25?"}, {"role": "assistant", "content": "It is 42."})


class Identity(BaseModel, strict=True, frozen=True):
    """What scores depend on. `reading` are the judge's settings that select and activate a logit. `sent` is a hash of
    the request that the source sends for a fixed conversation: protocol, chat template and parameters.
    """

    model: str
    reading: str
    sent: str

    @classmethod
    def of_source(cls, source: Any, reading: str) -> Identity:
        """Return the identity for an opened source."""
        request = Request(Sample([], _MESSAGES[-1]["content"]), messages=_MESSAGES)
        # A source of another package has only the question, which may hold its address.
        sent = getattr(source, "sent", source.question)(request)
        hashed = hashlib.blake2b(repr(sent).encode(), digest_size=16).hexdigest()
        return cls(model=str(source.model), reading=reading, sent=hashed)

    def difference(self, other: Identity) -> str:
        """Say how the file of `self` differs from the configuration of `other`; "" if it does not."""
        if self.model != other.model:
            return f"it was measured with the model {self.model!r}, and this one is {other.model!r}"
        if self.reading != other.reading:
            return f"it was measured with other settings of the judge ({self.reading}; now {other.reading})"
        if self.sent != other.sent:
            return "it was measured with another protocol, chat template or other parameters of the source"
        return ""


class Calibration(Identity):
    """Reference scores, as their file holds them: the identity of what gave them, their number, mean, standard
    deviation (of the population) and quantiles, by share.
    """

    kind: Literal["qreward calibration 1"]
    n: Annotated[int, Field(ge=FEWEST)]
    mean: Number
    std: Number
    quantiles: dict[str, Number]

    @model_validator(mode="after")
    def _has_spread(self) -> Calibration:
        if not _is_spread(self.mean, self.std):
            raise ValueError("the scores have no spread to scale by")
        return self

    @classmethod
    def measured(cls, scores: Sequence[float], identity: Identity) -> Calibration:
        """Compute it. Raises `InputError` for fewer than two scores, or scores that are all the same."""
        if len(scores) < FEWEST:
            raise InputError(f"{len(scores)} samples have a score; a calibration needs at least {FEWEST}")
        mean, std, ordered = fmean(scores), pstdev(scores), sorted(scores)
        if not _is_spread(mean, std):
            raise InputError(f"all {len(ordered):,} scores are {ordered[0]:g}, so they have no spread to scale by")
        percentiles = [ordered[0], *quantiles(ordered, n=100, method="inclusive"), ordered[-1]]
        found = {f"{share / 100:g}": percentiles[share] for share in _PERCENT}
        return cls(kind=_KIND, **identity.model_dump(), n=len(ordered), mean=mean, std=std, quantiles=found)

    @classmethod
    def read(cls, path: str, where: str) -> Calibration:
        """Read a file. `where` is the configuration key that names it. Raises `ConfigurationError`."""
        try:
            return cls.model_validate_json(Path(path).expanduser().read_bytes())
        except (FileNotFoundError, RuntimeError):  # an unknown user
            problem = "does not exist"
        except OSError as error:
            problem = f"cannot be read ({type(error).__name__})"
        except ValueError:
            problem = "is no calibration"
        raise ConfigurationError([Mistake(where, f"{path!r} {problem}.", REMEDY)])

    @classmethod
    def check_place(cls, path: Path) -> None:
        """Raise `InputError` if a file cannot be written at `path`, or if another kind of file is there."""
        check_writable(path)
        if path.exists():
            try:
                cls.model_validate_json(path.read_bytes())
            except (OSError, ValueError):
                raise InputError(f"{path}: exists and is no calibration; name another file") from None

    def write(self, path: Path) -> None:
        """Write the file in one step. Raises `InputError` if that fails."""
        beside = path.with_name(f".{path.name}.{os.getpid()}")
        try:
            beside.write_text(self.model_dump_json(indent=2) + "\n", encoding="utf-8")
            beside.replace(path)
        except OSError as error:
            with suppress(OSError):
                beside.unlink(missing_ok=True)
            raise InputError(f"{path}: cannot be written ({error.strerror or type(error).__name__})") from None


def _is_spread(mean: float, std: float) -> bool:
    """Whether scores differ by more than what rounding makes of equal scores."""
    return std > 1e-9 * max(1.0, abs(mean))


def _not_zero(scale: float) -> float:
    if scale == 0:
        raise ValueError("0 would give every response the same reward")
    return scale


def _as_mapping(step: Any) -> Any:
    """Read the step `sigmoid`, which has no settings."""
    if isinstance(step, str) and step != "sigmoid":
        raise ValueError("only the step `sigmoid` has no settings; write the others as {zscore: FILE}")
    return {step: True} if isinstance(step, str) else step


def _as_list(steps: Any) -> Any:
    """Read a single step."""
    return [steps] if isinstance(steps, (str, dict)) else steps


class Affine(Node):
    """scale * score + shift."""

    scale: Annotated[Number, AfterValidator(_not_zero)] = 1.0
    """Factor on the score; below 0 for a model that gives good responses low scores. Default: 1."""

    shift: Number = 0.0
    """Added after the factor. Default: 0."""


class TransformStep(Node):
    """One step; exactly one of its keys is set."""

    affine: Affine | None = None
    """`{scale: 0.5, shift: 1}`: scale * score + shift."""

    clip: Interval | None = None
    """`[-3, 3]`: scores beyond this range are set to its end."""

    sigmoid: Literal[True] | None = None
    """`sigmoid`: 1 / (1 + exp(-score)), 0 to 1."""

    zscore: Annotated[str, Field(min_length=1)] | None = None
    """Path to a file of reference scores that `qreward calibrate` has written: (score - mean) / standard deviation. It
    must be the first step, because the file describes the scores as they come from the model."""

    @model_validator(mode="after")
    def _one(self) -> TransformStep:
        keys = sorted(self.model_fields_set)
        if len(keys) != 1:
            raise ValueError("a step has exactly one of the keys affine, clip, sigmoid and zscore")
        return self


def _zscore_first(steps: tuple[TransformStep, ...]) -> tuple[TransformStep, ...]:
    if any(step.zscore is not None for step in steps[1:]):
        raise ValueError("zscore must be the first step")
    return steps


TransformSteps = Annotated[
    tuple[Annotated[TransformStep, BeforeValidator(_as_mapping)], ...],
    AfterValidator(_zscore_first),
    BeforeValidator(_as_list),
    takes("a step, or a list of steps"),
]
"""A list of steps, or a single one."""


def zscore_file(steps: Sequence[TransformStep]) -> str | None:
    """Return the path of the calibration that the steps use; None if they use none."""
    return next((step.zscore for step in steps if step.zscore is not None), None)


def transformed(score: float, steps: Sequence[TransformStep], calibration: Calibration | None) -> float:
    """Return the reward of a score; it may be infinite. `calibration` holds the reference scores of the step `zscore`,
    if there is one.
    """
    for step in steps:
        if step.affine is not None:
            score = step.affine.scale * score + step.affine.shift
        elif step.clip is not None:
            score = min(max(score, step.clip[0]), step.clip[1])
        elif step.zscore is not None and calibration is not None:
            score = (score - calibration.mean) / calibration.std
        else:
            score = sigmoid(score)
    return score


def sigmoid(score: float) -> float:
    """Return 1 / (1 + exp(-score)) without overflow."""
    return 1 / (1 + math.exp(-score)) if score >= 0 else math.exp(score) / (1 + math.exp(score))
