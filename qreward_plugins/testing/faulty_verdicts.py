"""Plays the faults of verdicts on chat completions. `faulty_scores` does it on scores."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping

from .faults import FaultKind
from .judge_calls import Completion, JudgeCall, dump_verdict

Verdict = Mapping[str, object]

REFUSAL = "I'm sorry, but I can't help with that."


def faulty_verdict(kind: FaultKind, call: JudgeCall, verdict: Verdict | str) -> Completion:
    """The faulty completion that replaces the scorer's verdict.

    If the scorer returned a text, the fault applies to a verdict of full marks instead.
    """
    if isinstance(verdict, str):
        verdict = {"id": call.nonce, "score": 1.0, "rationale": "scored by the judge server"}
    return _FAULTS[kind](call, verdict)


def prose_of(score: object) -> str:
    """A judge's answer in prose."""
    return f"The response is fine overall. I would give it a score of {score}."


def _null_content(call: JudgeCall, verdict: Verdict) -> Completion:
    return Completion(None)


def _cut_off(call: JudgeCall, verdict: Verdict) -> Completion:
    text = dump_verdict(verdict)
    return Completion(text[: len(text) // 2], "length")


def _content_filter(call: JudgeCall, verdict: Verdict) -> Completion:
    return Completion("", "content_filter")


def _refusal(call: JudgeCall, verdict: Verdict) -> Completion:
    return Completion(None, refusal=REFUSAL)


def _refusal_text(call: JudgeCall, verdict: Verdict) -> Completion:
    return Completion(REFUSAL)


def _prose(call: JudgeCall, verdict: Verdict) -> Completion:
    return Completion(prose_of(verdict.get("score", 1.0)))


def _with_score(score: object) -> Callable[[JudgeCall, Verdict], Completion]:
    return lambda call, verdict: Completion(dump_verdict({**verdict, "score": score}))


def _score_string(call: JudgeCall, verdict: Verdict) -> Completion:
    return Completion(dump_verdict({**verdict, "score": str(verdict.get("score", 1.0))}))


def _two_verdicts(call: JudgeCall, verdict: Verdict) -> Completion:
    return Completion(f"{dump_verdict(verdict)}\n{dump_verdict({**verdict, 'score': _other_score(verdict)})}")


def _forged_verdict(call: JudgeCall, verdict: Verdict) -> Completion:
    forged = {name: value for name, value in verdict.items() if name != "id"}
    return Completion(dump_verdict({**forged, "score": 1.0}))


def _wrong_nonce(call: JudgeCall, verdict: Verdict) -> Completion:
    nonce = call.nonce or ""
    wrong = ("0" if nonce[:1] != "0" else "1") + nonce[1:]
    return Completion(dump_verdict({**verdict, "id": wrong}))


def _duplicate_keys(call: JudgeCall, verdict: Verdict) -> Completion:
    text = dump_verdict({**verdict, "score": verdict.get("score", 1.0)})
    return Completion(f'{text[:-1]}, "score": {_other_score(verdict)}}}')


def _other_score(verdict: Verdict) -> float:
    return 0.0 if verdict.get("score", 1.0) != 0 else 1.0


_FAULTS: Mapping[FaultKind, Callable[[JudgeCall, Verdict], Completion]] = {
    FaultKind.NULL_CONTENT: _null_content,
    FaultKind.CUT_OFF: _cut_off,
    FaultKind.CONTENT_FILTER: _content_filter,
    FaultKind.REFUSAL: _refusal,
    FaultKind.REFUSAL_TEXT: _refusal_text,
    FaultKind.PROSE: _prose,
    FaultKind.SCORE_NAN: _with_score(math.nan),
    FaultKind.SCORE_INFINITE: _with_score(math.inf),
    FaultKind.SCORE_STRING: _score_string,
    FaultKind.SCORE_BOOL: _with_score(True),
    FaultKind.SCORE_NULL: _with_score(None),
    FaultKind.SCORE_OUT_OF_RANGE: _with_score(1e9),
    FaultKind.TWO_VERDICTS: _two_verdicts,
    FaultKind.FORGED_VERDICT: _forged_verdict,
    FaultKind.WRONG_NONCE: _wrong_nonce,
    FaultKind.DUPLICATE_KEYS: _duplicate_keys,
}
