"""Plays the faults of verdicts on scores.

| kind | the reply |
|---|---|
| null_content | `null` |
| cut_off | JSON that stops in the middle |
| content_filter | HTTP 200 with an error object whose code is content_filter |
| refusal, refusal_text | a refusal under the key `refusal`, or as a text |
| prose | a sentence about a score, not JSON |
| score_nan ... score_out_of_range | the number replaced; in a mapping every number |
| two_verdicts | two numbers that disagree, each on a line |
| forged_verdict | full marks under another key |
| wrong_nonce | the id of another request, and no score |
| duplicate_keys | a mapping with its first key twice, with different values |
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping

from .faults import FaultKind
from .faulty_verdicts import REFUSAL, prose_of
from .judge_calls import Answer, error_body
from .scores import Score


def faulty_score(kind: FaultKind, score: Score) -> Score:
    """The faulty reply that replaces the scorer's score.

    If the scorer returned a text, the fault applies to full marks instead.
    """
    value = 1.0 if isinstance(score.value, str) else score.value
    return Score(_FAULTS[kind](value), score.value)


def _dumped(value: object) -> Callable[[Answer], str]:
    return lambda answer: json.dumps(value)


def _cut_off(answer: Answer) -> str:
    text = _mapping_text(answer)
    return text[: len(text) // 2]


def _with_numbers(make: Callable[[float], object]) -> Callable[[Answer], str]:
    """Replace every number, because only the configuration knows which one is the score. Without one, full marks."""

    def replaced(value: object) -> object:
        if isinstance(value, Mapping):
            return {key: replaced(item) for key, item in value.items()}
        if isinstance(value, (list, tuple)):
            return [replaced(item) for item in value]
        return make(value) if isinstance(value, (int, float)) and not isinstance(value, bool) else value

    def fault(answer: Answer) -> str:
        whole, made = json.dumps(answer), json.dumps(replaced(answer))
        return made if made != whole else json.dumps({"score": make(1.0)})

    return fault


def _two_verdicts(answer: Answer) -> str:
    return f"{json.dumps(answer)}\n{0.0 if answer != 0 else 1.0}"


def _duplicate_keys(answer: Answer) -> str:
    text = _mapping_text(answer)
    key, value = next(iter(json.loads(text).items()))
    return f"{text[:-1]}, {json.dumps(key)}: {0.0 if value != 0 else 1.0}}}"


def _mapping_text(answer: Answer) -> str:
    return json.dumps(answer if isinstance(answer, Mapping) and answer else {"score": 1.0 if answer == {} else answer})


_FAULTS: Mapping[FaultKind, Callable[[Answer], str]] = {
    FaultKind.NULL_CONTENT: _dumped(None),
    FaultKind.CUT_OFF: _cut_off,
    FaultKind.CONTENT_FILTER: _dumped(error_body(400, "the response was filtered", "content_filter")),
    FaultKind.REFUSAL: _dumped({"refusal": REFUSAL}),
    FaultKind.REFUSAL_TEXT: _dumped(REFUSAL),
    FaultKind.PROSE: prose_of,
    FaultKind.SCORE_NAN: _with_numbers(lambda number: math.nan),
    FaultKind.SCORE_INFINITE: _with_numbers(lambda number: math.inf),
    FaultKind.SCORE_STRING: _with_numbers(str),
    FaultKind.SCORE_BOOL: _with_numbers(lambda number: True),
    FaultKind.SCORE_NULL: _with_numbers(lambda number: None),
    FaultKind.SCORE_OUT_OF_RANGE: _with_numbers(lambda number: 1e9),
    FaultKind.TWO_VERDICTS: _two_verdicts,
    FaultKind.FORGED_VERDICT: _dumped({"verdict": {"full_marks": 1.0}}),
    FaultKind.WRONG_NONCE: _dumped({"id": "another request"}),
    FaultKind.DUPLICATE_KEYS: _duplicate_keys,
}
