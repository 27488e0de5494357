"""Scoring requests, in the form of slime's remote reward model (`--rm-url`).

A scorer need not know the kind of request: a `ScoreCall` has the same blocks as the fences of a chat completion
request.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property

from .judge_calls import (
    OTHER_MODEL,
    Answer,
    JudgeCall,
    Refused,
    check_messages,
    count_tokens,
    dump_verdict,
    read_object,
    text_of,
)


@dataclass(frozen=True)
class ScoreCall(JudgeCall):
    """A scoring request, as the scorer gets it: a `JudgeCall` with the blocks `question` (the prompt's text),
    `response` and, if there is a label, `reference`.

    `messages` is the prompt, `parameters` has the further keys of the body. There is no nonce, and the score range is 0
    to 1.
    """

    response: str = ""
    label: object = None

    @cached_property
    def _fences(self) -> tuple[str | None, Mapping[str, str]]:
        blocks = {"question": self.prompt, "response": self.response}
        if self.label is not None:
            blocks["reference"] = self.label if isinstance(self.label, str) else json.dumps(self.label)
        return None, blocks

    @property
    def score_range(self) -> tuple[float, float]:
        return 0.0, 1.0

    @cached_property
    def prompt_tokens(self) -> int:
        """Tokens of the texts of the prompt, the response and a label that is a text, by `count_tokens` over all."""
        prompt = [text_of(message.get("content")) for message in self.messages]
        label = self.label if isinstance(self.label, str) else ""
        return count_tokens("".join((*prompt, self.response, label)))

    @property
    def max_tokens(self) -> int | None:
        return None


def read_score_call(body: bytes, model: str) -> ScoreCall:
    """Read the body of a scoring request: `prompt` (a text, or messages), `response` (a text), `label` (anything), and
    further keys. Raises `Refused` with the mistake.
    """
    fields = read_object(body)
    prompt, response, label = fields.pop("prompt", ""), fields.pop("response", None), fields.pop("label", None)
    if not isinstance(response, str):
        raise Refused(400, "'response' must be a string")
    if isinstance(prompt, str):
        prompt = [{"role": "user", "content": prompt}]
    if not isinstance(prompt, list):
        raise Refused(400, "'prompt' must be a string or a list of messages")
    check_messages(prompt)
    return ScoreCall(model, prompt, fields, response, label)


@dataclass(frozen=True)
class Score:
    """The reply to a scoring request: `text` is its body, `value` its value for faults to change."""

    text: str
    value: Answer

    @property
    def tokens(self) -> int:
        """Always 0: a score has no tokens."""
        return 0

    def reply(self, call: JudgeCall, number: int) -> ScoreReply:
        """The reply with it."""
        return ScoreReply(self.text, self.value)


@dataclass(frozen=True)
class ScoreReply:
    """The body of a reply with a score, and its faulty variants.

    The first half of a number is a number, too. So a truncated reply is a truncated mapping.
    """

    text: str
    value: Answer

    @property
    def good(self) -> bytes:
        return _encoded(self.text)

    @property
    def cuttable(self) -> bytes:
        return _encoded(dump_verdict(self._mapping()))

    @property
    def without_verdict(self) -> bytes:
        return b"{}"

    @property
    def of_another_model(self) -> bytes:
        return _encoded(dump_verdict({**self._mapping(), "model": OTHER_MODEL}))

    @property
    def invalid_utf8(self) -> bytes:
        return self.cuttable[:-1] + b', "rationale": "\xff\xfe"}'

    @property
    def around_filler(self) -> tuple[bytes, bytes]:
        return b'{"score": 1.0, "rationale": "', b'"}'

    def _mapping(self) -> dict[str, object]:
        if isinstance(self.value, Mapping):
            return dict(self.value) or {"score": 1.0}
        return {"score": self.value}


def as_score(answer: Answer) -> Score:
    """The reply for a scorer's answer: a number, a mapping, or a text that is sent unchanged.

    Raises `TypeError` for an answer of another type. NaN and infinity pass, because some services send them.
    """
    if isinstance(answer, str):
        return Score(answer, answer)
    if isinstance(answer, Mapping):
        return Score(dump_verdict(answer), answer)
    if isinstance(answer, (int, float)) and not isinstance(answer, bool):
        return Score(json.dumps(answer), answer)
    raise TypeError(f"the scorer returned {type(answer).__name__}: return a float, a mapping or a str")


def _encoded(text: str) -> bytes:
    return text.encode("utf-8", "surrogatepass")
