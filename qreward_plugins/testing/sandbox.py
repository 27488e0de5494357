"""The sandbox of a judge server: `POST /run_code` in the form of SandboxFusion.

It runs nothing. The scorer says what the program would print, or gives the whole reply.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from .faults import FaultKind
from .judge_calls import Answer, JudgeCall, JudgeReply, Refused, read_object

RUN_PATH = "/run_code"


@dataclass(frozen=True)
class RunCall(JudgeCall):
    """A request to run a program, as the scorer gets it. `parameters` has all fields of the body."""

    @property
    def code(self) -> str:
        return str(self.parameters["code"])

    @property
    def stdin(self) -> str:
        return str(self.parameters.get("stdin") or "")


def read_run_call(body: bytes) -> RunCall:
    """Read the body of a request. Raises `Refused` with the mistake."""
    fields = read_object(body)
    for name in ("code", "language"):
        if not isinstance(fields.get(name), str):
            raise Refused(422, f"{name!r} must be a string")
    return RunCall("sandbox", [], fields)


def ran(stdout: str = "", *, ended: str = "finished", stderr: str = "") -> dict[str, Any]:
    """Return SandboxFusion's reply for a program that printed `stdout` and `ended` so: `finished`, `run_error`,
    `timeout`, `compile_error` or `sandbox_error`. Raises KeyError for another word.
    """
    code = {"finished": 0, "run_error": 1, "compile_error": 1, "timeout": None, "sandbox_error": None}[ended]
    status = "Finished" if code is not None else "Error" if ended == "sandbox_error" else "TimeLimitExceeded"
    command = {"status": status, "execution_time": 0.1, "return_code": code, "stdout": stdout, "stderr": stderr}
    outer = {"finished": "Success", "sandbox_error": "SandboxError"}.get(ended, "Failed")
    compiled = ended == "compile_error"
    return {
        "status": outer,
        "message": stderr if ended == "sandbox_error" else "",
        "compile_result": command if compiled else None,
        "run_result": None if compiled else command,
        "executor_pod_name": None,
        "files": {},
    }


def run_reply(call: JudgeCall, answers: Sequence[Answer], fault: FaultKind | None, number: int) -> JudgeReply:
    """The reply for a scorer's answer: what the program prints, a text or a number; or the whole reply, a mapping.

    A fault of the stage "verdict" is one of the sandbox: it could not run the program, or a field is wrong.
    """
    answer = answers[0]
    fields = dict(answer) if isinstance(answer, Mapping) else ran(str(answer))
    if fault is not None and fault.stage == "verdict":
        flaw = _FLAWS.get(fault)
        fields = ran(ended="sandbox_error", stderr=fault.says) if flaw is None else {**fields, **flaw}
    return JudgeReply(fields)


_FLAWS: Mapping[FaultKind, Mapping[str, Any]] = {
    FaultKind.NULL_CONTENT: {"run_result": None},
    FaultKind.CUT_OFF: {"run_result": {"status": "Finished", "return_code": 0}},
    FaultKind.SCORE_STRING: {"run_result": {"status": "Finished", "return_code": "0", "stdout": ""}},
    FaultKind.SCORE_BOOL: {"run_result": {"status": "Finished", "return_code": False, "stdout": ""}},
    FaultKind.TWO_VERDICTS: {"status": "Failed"},
}
