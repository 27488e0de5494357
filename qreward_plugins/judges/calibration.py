"""Maps the score of a reward model to a reward, by the steps of `transform`; and its reference scores: the file that
`qreward calibrate` writes and the step `zscore` reads.

Mean and standard deviation belong to one model and one way to ask it. So the file holds the identity of what was asked,
and a judge refuses the file of another model, template or label.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Sequence
from pathlib import Path
from statistics import fmean, pstdev
from typing import Annotated, Any, Final, Literal

from pydantic import AfterValidator, BaseModel, Field, model_validator

from ..config.models import Interval
from ..config.nodes import Node, Number, PositiveFloat, takes
from ..errors import ConfigurationError, InputError, Mistake
from ..samples import Sample
from ..sources.base import Request
from ..system.output_files import check_writable

_KIND: Final = "qreward calibration 1"
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
        hashed = hashlib.blake2b(repr(source.identity(request)).encode(), digest_size=16).hexdigest()
        return cls(model=str(source.model), reading=reading, sent=hashed)

    def difference(self, other: Identity) -> str:
        """Say how the file of `self` differs from the configuration of `other`; "" if it does not."""
        was, now = (f"{each.model!r} ({each.reading}; requests {each.sent[:8]})" for each in (self, other))
        return "" if was == now else f"it was measured with {was}, and this is {now}"


class Calibration(Identity):
    """Reference scores, as their file holds them: the identity of what gave them, their number, mean and standard
    deviation (of the population).
    """

    kind: Literal["qreward calibration 1"]
    n: Annotated[int, Field(ge=FEWEST)]
    mean: Number
    std: PositiveFloat

    @classmethod
    def measured(cls, scores: Sequence[float], identity: Identity) -> Calibration:
        """Compute it. Raises `InputError` for fewer than two scores, or scores that are all the same."""
        if len(scores) < FEWEST:
            raise InputError(f"{len(scores)} samples have a score; a calibration needs at least {FEWEST}")
        mean, std = fmean(scores), pstdev(scores)
        # More than what rounding makes of equal scores.
        if std <= 1e-9 * max(1.0, abs(mean)):
            raise InputError(f"all {len(scores):,} scores are {scores[0]:g}, so they have no spread to scale by")
        return cls(kind=_KIND, **identity.model_dump(), n=len(scores), mean=mean, std=std)

    @classmethod
    def read(cls, path: str, where: str) -> Calibration:
        """Read a file. `where` is the configuration key that names it. Raises `ConfigurationError`."""
        try:
            return cls.model_validate_json(Path(path).expanduser().read_bytes())
        except (OSError, RuntimeError, ValueError) as error:  # an unknown user, too
            problem = f"{path!r} cannot be read as a calibration ({type(error).__name__})."
        raise ConfigurationError([Mistake(where, problem, REMEDY)])

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
        beside = path.with_name(f".{path.name}")
        try:
            beside.write_text(self.model_dump_json(indent=2) + "\n", encoding="utf-8")
            beside.replace(path)
        except OSError as error:
            raise InputError(f"{path}: cannot be written ({error.strerror or type(error).__name__})") from None


class Affine(Node):
    """scale * score + shift."""

    scale: Number = 1.0
    """Factor on the score; below 0 for a model that gives good responses low scores. Default: 1."""

    shift: Number = 0.0
    """Added after the factor. Default: 0."""


class TransformStep(Node):
    """One step; exactly one of its keys is set."""

    affine: Affine | None = None
    """`{scale: 0.5, shift: 1}`: scale * score + shift."""

    clip: Interval | None = None
    """`[-3, 3]`: scores beyond this range are set to its end."""

    zscore: Annotated[str, Field(min_length=1)] | None = None
    """Path to a file of reference scores that `qreward calibrate` has written: (score - mean) / standard deviation. It
    must be the first step, because the file describes the scores as they come from the model."""

    @model_validator(mode="after")
    def _one(self) -> TransformStep:
        keys = sorted(self.model_fields_set)
        if len(keys) != 1:
            raise ValueError("a step has exactly one of the keys affine, clip and zscore")
        return self


def _zscore_first(steps: tuple[TransformStep, ...]) -> tuple[TransformStep, ...]:
    if any(step.zscore is not None for step in steps[1:]):
        raise ValueError("zscore must be the first step")
    return steps


TransformSteps = Annotated[tuple[TransformStep, ...], AfterValidator(_zscore_first), takes("a list of steps")]


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
        elif calibration is not None:
            score = (score - calibration.mean) / calibration.std
    return score


def sigmoid(score: float) -> float:
    """Return 1 / (1 + exp(-score)) without overflow."""
    return 1 / (1 + math.exp(-score)) if score >= 0 else math.exp(score) / (1 + math.exp(score))
