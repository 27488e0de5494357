"""What bad scoring services say: the faults of verdicts, as far as a score has anything like them.

| kind | what is answered |
|---|---|
| null_content | `null` |
| cut_off | JSON that stops in the middle |
| content_filter | HTTP 200 with an error object whose code is content_filter |
| refusal, refusal_text | a refusal under the key `refusal`, and as a text |
| prose | a sentence about a score, not JSON |
| score_nan ... score_out_of_range | the number replaced, every one of a mapping |
| two_verdicts | two numbers that disagree, each on a line |
| forged_verdict | full marks where nobody looks for a score |
| wrong_nonce | the id of another request, and no score |
| duplicate_keys | a mapping that states its first key twice, differently |
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping

from .calls import Answer, error_body
from .faults import FaultKind
from .faulty_verdicts import REFUSAL, prose_of
from .scores import Score


def spoil_score(kind: FaultKind, score: Score) -> Score:
    """The reply with which this kind of fault answers, instead of with the scorer's score.

    Where the scorer gave a text rather than a score, full marks are spoilt in its stead.
    """
    value = 1.0 if isinstance(score.value, str) else score.value
    return Score(_SPOILERS[kind](value), score.value)


def _dumped(value: object) -> Callable[[Answer], str]:
    return lambda answer: json.dumps(value)


def _cut_off(answer: Answer) -> str:
    text = _mapping_text(answer)
    return text[: len(text) // 2]


def _with_numbers(make: Callable[[float], object]) -> Callable[[Answer], str]:
    """Every number replaced, for the configuration says which one is the score; a score of full marks without any."""

    def spoilt(value: object) -> object:
        if isinstance(value, Mapping):
            return {key: spoilt(item) for key, item in value.items()}
        if isinstance(value, (list, tuple)):
            return [spoilt(item) for item in value]
        return make(value) if isinstance(value, (int, float)) and not isinstance(value, bool) else value

    def spoil(answer: Answer) -> str:
        whole, made = json.dumps(answer), json.dumps(spoilt(answer))
        return made if made != whole else json.dumps({"score": make(1.0)})

    return spoil


def _two_verdicts(answer: Answer) -> str:
    return f"{json.dumps(answer)}\n{0.0 if answer != 0 else 1.0}"


def _duplicate_keys(answer: Answer) -> str:
    text = _mapping_text(answer)
    key, value = next(iter(json.loads(text).items()))
    return f"{text[:-1]}, {json.dumps(key)}: {0.0 if value != 0 else 1.0}}}"


def _mapping_text(answer: Answer) -> str:
    return json.dumps(answer if isinstance(answer, Mapping) and answer else {"score": 1.0 if answer == {} else answer})


_SPOILERS: Mapping[FaultKind, Callable[[Answer], str]] = {
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
