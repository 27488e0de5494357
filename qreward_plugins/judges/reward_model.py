"""Defines `RewardModelJudge`: it turns the logits of a reward model into a verdict.

A reward model gets no instructions, so there is no fence. But servers tokenize control tokens in a text: a response
with `<|im_end|>` could end its own turn and add one that scores better. So they are neutralised here, as in the prompt
of an LLM judge. An image of the prompt is shown as `[image]`.

The journal keeps the logits. So another label, activation, reduction or transform costs no request.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field

from ..config.models import AskingConfig
from ..config.nodes import no_bool, takes
from ..errors import ConfigurationError, InvalidReply, Mistake
from ..samples import Cause, Failed, Message, RawScore, Sample, Verdict, fits_float32
from ..sources.base import Reply, Request, Source
from ..sources.kind import LOGITS
from .base import Opening
from .calibration import REMEDY, Calibration, Identity, TransformSteps, sigmoid, transformed, zscore_file
from .fence import is_blank, neutralise
from .leaf import Leaf, fingerprint
from .parts import split
from .views import SampleTexts, conversation_turns


class RewardModelJudge(Leaf):
    """The score of a reward model, or the scores of its steps, with an activation and a transformation.

    reward = transform(activation(logit)). For a process reward model: transform(reduce(activation(logit) of each
    step)). Raises `ConfigurationError` for settings that contradict each other, and for reference scores that cannot be
    read.
    """

    class Config(AskingConfig):
        """The score of a reward model (a source of kind `reward_model`)."""

        label: Annotated[
            Annotated[int, Field(ge=0), BeforeValidator(no_bool)] | Annotated[str, Field(min_length=1)] | None,
            takes("a whole number, 0 or more, or text that is not empty"),
        ] = None
        """The label whose logit is the score: its position (0, 1 ...) or, where the server names labels, its name.
        Default: the only one. A model with several labels needs it."""

        activation: Literal["raw", "sigmoid", "softmax"] = "raw"
        """What is applied to the logit. `raw` (default): nothing. `sigmoid`: for one label, 0 to 1. `softmax`: the
        share of the label among all labels of the model, 0 to 1."""

        reduce: Literal["last", "min", "mean", "prod"] | None = None
        """How the scores of the steps of a process reward model (`vllm_steps`) become one
        score: the `last` one, the lowest, their mean, or their product, which needs `activation: softmax` or `sigmoid`.
        With `dense`, the score of each step is transformed and gets its part of the whole; `prod` has no parts.
        Default: none; the source scores whole responses."""

        transform: TransformSteps = ()
        """Steps that map the score to the reward, applied in this order: `zscore: FILE`, `affine: {scale, shift}`,
        `clip: [low, high]`. Default: none."""

    asks = LOGITS

    @classmethod
    def tells_steps(cls, config: Any) -> bool:
        return config.reduce not in (None, "prod")

    @classmethod
    def measurement(cls, config: Any) -> tuple[AskingConfig, str] | None:
        file = zscore_file(config.transform)
        plain = {"transform": (), "reward_range": None, "correct_at": None, "floor": None, "on_invalid": "missing"}
        return None if file is None else (config.model_copy(update=plain), file)

    def __init__(self, name: str, config: Config, opening: Opening) -> None:
        mistakes: list[Mistake] = []
        if config.reduce == "prod" and config.activation == "raw":
            problem = "a product of raw logits changes its sign with every bad step."
            mistakes.append(Mistake(f"judges.{name}.reduce", problem, "Set activation: softmax or sigmoid."))
        file, self._calibration = zscore_file(config.transform), None
        if file is not None:
            try:
                self._calibration = Calibration.read(file, f"judges.{name}.transform")
            except ConfigurationError as error:
                mistakes += error.mistakes
        identity = fingerprint("reward_model")
        super().__init__(name, config, sources=opening.sources, fingerprint=identity, mistakes=mistakes)
        self._config = config

    def mistakes(self, sources: Mapping[str, Source]) -> list[Mistake]:
        """Find sources whose scores have another scale than those of the calibration, or of each other."""
        if self._calibration is None:
            models = {source.model: name for name, source in sources.items()}
            if len(models) < 2:
                return []
            problem = (
                f"it asks different models ({', '.join(models.values())}), and their scores have different scales."
            )
            remedy = "Name the source of one model; give each other one a judge of its own, and add them by kind: sum."
            return [Mistake(f"judges.{self.name}.sources", problem, remedy)]
        found = {name: self._calibration.difference(self.identity(source)) for name, source in sources.items()}
        where, file = f"judges.{self.name}.transform", zscore_file(self._config.transform)
        return [
            Mistake(where, f"{file!r} does not suit the source {name!r}: {difference}.", REMEDY)
            for name, difference in found.items()
            if difference
        ]

    def identity(self, source: Source) -> Identity:
        """Return what the scores of this judge at `source` depend on."""
        config = self._config
        reading = f"label {config.label}, activation {config.activation}, reduce {config.reduce}"
        return Identity.of_source(source, reading)

    def screen(self, sample: Sample) -> Verdict | None:
        """Return the floor for a response without a visible character, if there is a floor."""
        response: object = sample.response
        if isinstance(response, str) and is_blank(response):
            return self.instead(Failed(Cause.POLICY, "empty", "the response is empty", judge=self.name))
        return None

    def request(self, sample: Sample, *, attempt: int) -> Request:
        """Build the conversation, whose last turn is the response. Raises `InputError` for messages that cannot be
        written as text.
        """
        texts = SampleTexts.of(sample)
        turns: list[Message] = [*conversation_turns(sample.messages), {"role": "assistant", "content": texts.response}]
        messages = tuple(Message(role=neutralise(turn["role"]), content=neutralise(turn["content"])) for turn in turns)
        return Request(sample=sample, messages=messages, judge=self.name)

    def verdict(self, request: Request, reply: Reply) -> Verdict:
        """Read the logits. Raises `InvalidReply` if the label is missing, or the reward is out of range."""
        value = reply.value
        if isinstance(value, Mapping) and self._config.reduce is None:
            return self._of_response({str(label): float(logit) for label, logit in value.items()}, model=reply.model)
        if not isinstance(value, (Mapping, Sequence)) or isinstance(value, str) or not value:
            raise InvalidReply("the reply holds no logits")
        if isinstance(value, Mapping) or self._config.reduce is None:
            found = "whole responses; leave out" if isinstance(value, Mapping) else "steps; set"
            raise InvalidReply(f"the reward model scores {found} judges.{self.name}.reduce")
        steps = [(int(offset), {str(label): float(logit) for label, logit in row.items()}) for offset, row in value]
        return self._of_steps(steps, model=reply.model)

    def mapped(self, raw: RawScore) -> Verdict:
        if self._config.reduce is None:
            return self._of_response(raw.components)
        return self._of_steps(_unpacked(raw.components))

    def component_names(self) -> tuple[str, ...]:
        return ("logit",) if self._config.reduce is None else ("steps",)

    def _of_response(self, logits: Mapping[str, float], *, model: str = "") -> Verdict:
        logit = self._logit(logits)
        score = self._activated(logit, logits)
        return self._verdict(score, {"logit": logit}, RawScore(logit, dict(logits)), model)

    def _of_steps(self, steps: Sequence[tuple[int, Mapping[str, float]]], *, model: str = "") -> Verdict:
        scores = [self._activated(self._logit(logits), logits) for _, logits in steps]
        score, _ = split(scores, self._config.reduce or "last")
        raw = RawScore(score, _packed(steps))
        offsets = (offset for offset, _ in steps)
        components = {"steps": float(len(steps))}
        return self._verdict(score, components, raw, model, tuple(zip(offsets, scores, strict=True)))

    def _verdict(
        self,
        score: float,
        components: Mapping[str, float],
        raw: RawScore,
        model: str,
        steps: tuple[tuple[int, float], ...] = (),
    ) -> Verdict:
        config = self._config
        reward = transformed(score, config.transform, self._calibration)
        if not fits_float32(reward):
            raise InvalidReply(f"the reward {reward:g} is not finite in float32, the type of trainers")
        if config.reward_range is not None and not config.reward_range[0] <= reward <= config.reward_range[1]:
            low, high = config.reward_range
            raise InvalidReply(
                f"the reward {reward:g} is outside the reward range {low:g} to {high:g}; add a last step `clip: "
                f"[{low:g}, {high:g}]` to judges.{self.name}.transform, or another scale"
            )
        rewards = [transformed(each, config.transform, self._calibration) for _, each in steps]
        added = split(rewards, config.reduce or "last")[1] if rewards else ()
        if not all(map(fits_float32, added)):
            raise InvalidReply("what a step adds is not finite in float32, the type of trainers")
        dense = tuple((end, each) for (end, _), each in zip(steps, added, strict=False))
        return self.verdict_with(reward, components, model=model, raw=raw, steps=steps, dense=dense)

    def _logit(self, logits: Mapping[str, float]) -> float:
        label = self._config.label
        if label is None and len(logits) == 1:
            return next(iter(logits.values()))
        if label is not None and str(label) in logits:
            return logits[str(label)]
        known = ", ".join(sorted(logits)[:10])
        what = "needs a label" if label is None else f"has no label {str(label)!r}"
        raise InvalidReply(f"the reward model {what} (it has {known}); set judges.{self.name}.label")

    def _activated(self, logit: float, logits: Mapping[str, float]) -> float:
        if self._config.activation == "raw":
            return logit
        if self._config.activation == "sigmoid":
            return sigmoid(logit)
        if len(logits) == 1:
            raise InvalidReply(
                f"a softmax over one label is 1 for every response; set judges.{self.name}.activation to raw or sigmoid"
            )
        most = max(logits.values())
        return math.exp(logit - most) / sum(math.exp(other - most) for other in logits.values())


def _packed(steps: Sequence[tuple[int, Mapping[str, float]]]) -> dict[str, float]:
    """Write the logits of steps as one mapping, the form of the journal: offset, colon, label."""
    return {f"{offset}:{label}": logit for offset, logits in steps for label, logit in logits.items()}


def _unpacked(components: Mapping[str, float]) -> list[tuple[int, dict[str, float]]]:
    """Read what `_packed` has written. Raises ValueError."""
    steps: dict[int, dict[str, float]] = {}
    for name, logit in components.items():
        offset, colon, label = name.partition(":")
        if not colon:
            raise ValueError("not the logits of a step")
        steps.setdefault(int(offset), {})[label] = logit
    return sorted(steps.items())
