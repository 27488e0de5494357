"""Scoring requests, in the form of slime's remote reward model (`--rm-url`).

A scorer need not know the kind of request: a `ScoreCall` has the same blocks as the fences of a chat completion
request.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property

from .faults import FaultKind
from .faulty_answers import faulty_score
from .judge_calls import (
    Answer,
    Content,
    Forms,
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


def score_content(answer: Answer, fault: FaultKind | None) -> Content:
    """The reply for a scorer's answer: a number, a mapping, or a text that is sent unchanged.

    The first half of a number is a number, too. So the forms that faults cut are mappings. Raises `TypeError` for an
    answer of another type. NaN and infinity pass, because some services send them.
    """
    if fault is not None and fault.stage == "verdict":
        text = faulty_score(fault, answer)
    elif isinstance(answer, str):
        text = answer
    elif isinstance(answer, Mapping) or (isinstance(answer, (int, float)) and not isinstance(answer, bool)):
        text = dump_verdict(answer)
    else:
        raise TypeError(f"the scorer returned {type(answer).__name__}: return a float, a mapping or a str")
    fields = (dict(answer) or {"score": 1.0}) if isinstance(answer, Mapping) else {"score": answer}
    around = (b'{"score": 1.0, "rationale": "', b'"}')
    forms = Forms(fields, {}, around, text.encode("utf-8", "surrogatepass"))
    return Content(0, lambda call, number: forms)
