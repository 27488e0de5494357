"""The outcome of a sample, from what its judge returned or raised.

A judge is foreign code: it may return anything and raise anything. So its verdicts are checked here, and a bug costs
one sample.
"""

from __future__ import annotations

import logging
from types import NoneType
from typing import Any, TypeGuard

from ..judges import Judge, JudgeFailed
from ..judges.leaf import failed
from ..samples import Cause, Failed, Scored, Verdict
from ..scheduling import CallFailed, Unanswered

_log = logging.getLogger("qreward_plugins.engine")

_TEXTS = ("rationale", "judge", "source", "model")


def scored(verdict: Verdict, judge: Judge) -> Scored:
    """The outcome of a verdict. Raises TypeError for a verdict with fields of a wrong type."""
    if not isinstance(verdict, Verdict):
        raise TypeError(f"judge {judge.name} returned a {type(verdict).__name__}, not a Verdict")
    wrong = _wrong_fields(verdict)
    if wrong:
        raise TypeError(f"judge {judge.name} returned a Verdict with a wrong {wrong}")
    return Scored(verdict)


def _wrong_fields(verdict: Any) -> str:
    """The fields of a verdict that have a wrong type; "" if there are none."""
    failed_with = verdict.failure
    if failed_with is not None and not _is_failed(failed_with):
        return "failure"
    if (verdict.basis == "floor") != (failed_with is not None):
        return "basis: it must be 'floor' exactly if `failure` is set"
    wrong: list[str] = []
    # The usual types first: this runs for every sample.
    if not type(verdict.rationale) is type(verdict.judge) is type(verdict.source) is type(verdict.model) is str:
        texts = (verdict.rationale, verdict.judge, verdict.source, verdict.model)
        wrong = [name for name, text in zip(_TEXTS, texts, strict=True) if not isinstance(text, str)]
    if not isinstance(verdict.correct, (bool, NoneType)):
        wrong.append("correct")
    if verdict.components and not all(isinstance(name, str) for name in verdict.components):
        wrong.append("name of a component")
    return ", ".join(wrong)


def _is_failed(value: object) -> TypeGuard[Failed]:
    return (
        isinstance(value, Failed)
        and isinstance(value.cause, Cause)
        and all(isinstance(text, str) for text in (value.reason, value.detail, value.judge, value.source))
    )


def failure(error: BaseException, judge: Judge) -> Failed:
    """The failure of a sample whose judge raised `error`. A bug in a judge costs its sample, not the run."""
    if isinstance(error, JudgeFailed):
        raised = getattr(error, "failed", None)
        if _is_failed(raised):
            return raised
    elif isinstance(error, CallFailed):
        result = getattr(error, "why", None)
        if isinstance(result, Unanswered):
            return failed(result, judge.name)
    _log.error("unexpected %s from judge %s", type(error).__name__, judge.name, exc_info=error)
    return Failed(Cause.INFRA, "bug", f"unexpected {type(error).__name__}; see the log", judge=judge.name)
