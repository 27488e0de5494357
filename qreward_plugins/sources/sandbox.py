"""Defines `SandboxSource`: a sandbox that runs one program and answers with what it printed.

The form is that of SandboxFusion's `POST /run_code` (`sandbox/server/sandbox_api.py` of bytedance/SandboxFusion).

A program that fails is an answer. A sandbox that fails is a `TransientError`, and never counts against the program: so
are a run that the sandbox could not make (`SandboxError`, or a command with the status `Error`), a missing field, and a
status that contradicts the exit code.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ..config.nodes import PositiveInt
from ..config.source_models import EndpointConfig, URLs
from ..errors import QRewardError
from .base import Reply, Request
from .endpoint import Endpoint
from .kind import RUN
from .replies import Answer

_STDERR_CHARS = 1_000


class RunAnswer(Answer):
    """One HTTP reply of a sandbox."""

    def read_content(self, content: Any) -> Reply | QRewardError:
        status = content.get("status")
        part = content.get("compile_result")
        ended = "finished" if part is None else _ended(part)
        if ended == "finished":
            part = content.get("run_result")
            ended = _ended(part)
        elif ended:
            ended = "compile_error"
        finished = ended == "finished"
        contradicts = status not in ("Success", "Failed") or (status == "Success") != finished
        if not ended or contradicts or (finished and not isinstance(part.get("stdout"), str)):
            return self.unreadable("a run that is not whole", self.http.body)
        stdout, stderr = (str(part.get(name) or "") for name in ("stdout", "stderr"))
        return Reply(text=stdout, value=stderr[-_STDERR_CHARS:], finish_reason=ended)


def _ended(command: Any) -> str:
    """How a command ended; "" if the sandbox does not say so, or could not start it."""
    if not isinstance(command, Mapping):
        return ""
    if command.get("status") == "TimeLimitExceeded":
        return "timeout"
    code = command.get("return_code")
    if command.get("status") != "Finished" or type(code) is not int:
        return ""
    return "run_error" if code else "finished"


class SandboxSource(Endpoint):
    """A sandbox that runs programs: SandboxFusion, or a server of the same form.

    Raises ConfigurationError as every `Endpoint` does.
    """

    class Config(EndpointConfig):
        """A sandbox that runs one program a request, in the form of SandboxFusion's `POST /run_code`. Programs of the
        policy never run on this machine."""

        url: URLs
        """The whole URL that programs are posted to, e.g. `http://localhost:8080/run_code`; or a list of replicas that
        share the limits of this source."""

        max_reply_bytes: PositiveInt = 16_777_216
        """Largest body of a reply in bytes; a larger one fails the attempt. SandboxFusion keeps 1
        MiB of each output, and a character may take six bytes of JSON. Default: 16 MiB."""

    answers = (RUN,)
    ANSWER = RunAnswer

    def body(self, request: Request) -> Mapping[str, Any]:
        return request.parameters
