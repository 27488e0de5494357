"""Defines `RewardModelJudge`: it turns the logits of a reward model into a verdict.

A reward model gets no instructions, so there is no fence. But servers tokenize control tokens in a text: a response
with `<|im_end|>` could end its own turn and add one that scores better. So they are neutralised here, as in the prompt
of an LLM judge.

The journal keeps the logits. So another label, activation or scale costs no request.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, Field

from ..config.judge_models import AskingConfig, Interval
from ..config.nodes import Integer, Number
from ..errors import ConfigurationError, InvalidReply, Mistake
from ..samples import Cause, Failed, Message, RawScore, Sample, Verdict, fits_float32
from ..sources.base import Reply, Request
from ..sources.kind import LOGITS
from .base import Opening
from .control_tokens import neutralise
from .leaf import Leaf, fingerprint, number_mistakes
from .sample_texts import SampleTexts, conversation_turns
from .visibility import is_blank


def _not_zero(scale: float) -> float:
    if scale == 0:
        raise ValueError("0 would give every response the same reward")
    return scale


class RewardModelJudge(Leaf):
    """The score of a reward model, with an activation and a linear transformation.

    reward = clip(scale * activation(logit) + shift). Raises `ConfigurationError` for numbers that contradict each
    other.
    """

    class Config(AskingConfig):
        """The score of a reward model (a source of kind `reward_model`)."""

        label: Annotated[Integer, Field(ge=0)] | Annotated[str, Field(min_length=1)] | None = None
        """The label whose logit is the score: its position (0, 1 ...) or, where the server names labels, its name.
        Default: the only one. A model with several labels needs it."""

        activation: Literal["raw", "sigmoid", "softmax"] = "raw"
        """What is applied to the logit. `raw` (default): nothing. `sigmoid`: for one label, 0 to 1. `softmax`: the
        share of the label among all labels of the model, 0 to 1."""

        scale: Annotated[Number, AfterValidator(_not_zero)] = 1.0
        """Factor on the score, after the activation. For a z-score: 1 / standard deviation. Default: 1."""

        shift: Number = 0.0
        """Added after the factor. For a z-score: -mean / standard deviation. Default: 0."""

        clip: Interval | None = None
        """Rewards beyond this range are set to its end. Default: none."""

    asks = LOGITS

    @classmethod
    def open(cls, name: str, config: Any, opening: Opening) -> RewardModelJudge:
        return cls(name, config, sources=opening.sources)

    @classmethod
    def rehearsed(cls, config: Any, request: Request, share: float) -> Reply:
        label = "0" if config.label is None else str(config.label)
        low, high = config.clip or config.reward_range or (0.0, 1.0)
        score = (low + share * (high - low) - config.shift) / config.scale
        if config.activation != "raw":
            score = min(max(score, 0.01), 0.99)
            score = math.log(score / (1 - score))
        other = {"other": 0.0} if config.activation == "softmax" else {}
        return Reply(value={label: score, **other})

    def __init__(self, name: str, config: Config, *, sources: Sequence[str]) -> None:
        mistakes = number_mistakes(name, config)
        if config.clip and config.reward_range and not _within(config.clip, config.reward_range):
            path = f"judges.{name}.clip"
            mistakes.append(Mistake(path, "it is not within the reward range.", "Leave out `reward_range`."))
        if mistakes:
            raise ConfigurationError(mistakes)
        super().__init__(name, config, sources=sources, fingerprint=fingerprint("reward_model"))
        self._config = config

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
        if not isinstance(reply.value, Mapping):
            raise InvalidReply("the reply holds no logits")
        logits = {str(label): float(logit) for label, logit in reply.value.items()}
        return self._verdict(logits, model=reply.model)

    def mapped(self, raw: RawScore) -> Verdict:
        return self._verdict(raw.components)

    def component_names(self) -> tuple[str, ...]:
        return ("logit",)

    def _verdict(self, logits: Mapping[str, float], *, model: str = "") -> Verdict:
        logit = self._logit(logits)
        config = self._config
        reward = config.scale * self._activated(logit, logits) + config.shift
        if config.clip is not None:
            reward = min(max(reward, config.clip[0]), config.clip[1])
        if not fits_float32(reward):
            raise InvalidReply(f"the reward {reward:g} is not finite in float32, the type of trainers")
        if config.reward_range is not None and not config.reward_range[0] <= reward <= config.reward_range[1]:
            low, high = config.reward_range
            raise InvalidReply(
                f"the reward {reward:g} is outside the reward range {low:g} to {high:g}; set "
                f"judges.{self.name}.clip, or another scale"
            )
        return Verdict(
            score=reward,
            components={"logit": logit},
            correct=None if config.correct_at is None else reward >= config.correct_at,
            judge=self.name,
            model=model,
            raw=RawScore(logit, dict(logits)),
        )

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
            return 1 / (1 + math.exp(-logit)) if logit >= 0 else math.exp(logit) / (1 + math.exp(logit))
        if len(logits) == 1:
            raise InvalidReply(
                f"a softmax over one label is 1 for every response; set judges.{self.name}.activation to raw or sigmoid"
            )
        most = max(logits.values())
        return math.exp(logit - most) / sum(math.exp(other - most) for other in logits.values())


def _within(inner: tuple[float, float], outer: tuple[float, float]) -> bool:
    return outer[0] <= inner[0] and inner[1] <= outer[1]
