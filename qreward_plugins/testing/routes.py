"""The paths of a judge server: chat in several protocols, scores, and programs.

Each has its own requests and replies; limits, latency, faults and the report are shared.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import orjson

from .faults import FaultKind
from .faulty_answers import faulty_verdict
from .judge_calls import Answer, Completion, JudgeCall, JudgeReply, as_verdict, dump_verdict
from .protocols import PROTOCOLS, Protocol
from .protocols.reward_models import WIRES, read_scored, scored_reply
from .sandbox import RUN_PATH, read_run_call, run_reply

_PATHS = {"openai": "/v1/chat/completions", "responses": "/v1/responses", "anthropic": "/v1/messages"}
_GENERATE = ":generateContent"
_STREAM = ":streamGenerateContent"
_VERSIONS = ("/v1beta", "/v1")


@dataclass(frozen=True)
class Route:
    """One path. `read` reads a request and raises `Refused` for the client's mistakes. `reply` makes the n-th reply of
    the scorer's answers, one for each text of the request, with a fault of the stage "verdict" or "list" applied; it
    raises `TypeError` for an invalid answer. `protocol` writes errors and limits. `streams`: whether a reply is
    streamed; None: the body says so.
    """

    protocol: Protocol
    read: Callable[[bytes], JudgeCall]
    reply: Callable[[JudgeCall, Sequence[Answer], FaultKind | None, int], JudgeReply]
    streams: bool | None = False

    def stream_options(self, body: bytes) -> Mapping[str, Any] | None:
        """Return the `stream_options` of a request, which was read, if it asks for a stream; None if it does not."""
        asked = orjson.loads(body) if self.streams is None else {"stream": self.streams}
        if asked.get("stream") is not True:
            return None
        options = asked.get("stream_options")
        return options if isinstance(options, dict) else {}


class Routes:
    """The routes of a server of these models. `protocols` are names in `PROTOCOLS`; raises `ValueError` for others."""

    def __init__(self, models: Sequence[str], protocols: Sequence[str]) -> None:
        unknown = [name for name in protocols if name not in PROTOCOLS]
        if unknown or not protocols:
            raise ValueError(f"a judge server needs protocols among {', '.join(PROTOCOLS)}, not {', '.join(unknown)!r}")
        self._models = tuple(models)
        self._protocols = tuple(protocols)
        openai = PROTOCOLS["openai"]
        self._fixed = {_PATHS[name]: self._chat(PROTOCOLS[name]) for name in protocols if name in _PATHS}
        for path in WIRES:
            self._fixed[path] = Route(openai, partial(read_scored, path, models=self._models), scored_reply)
        self._fixed[RUN_PATH] = Route(openai, read_run_call, run_reply)

    @property
    def paths(self) -> tuple[str, ...]:
        """The paths, for messages."""
        generate = tuple(f"/v1beta/models/MODEL{end}" for end in (_GENERATE, f"{_STREAM}?alt=sse"))
        return (*self._fixed, *(generate if "gemini" in self._protocols else ()))

    def find(self, path: str, alt: str = "") -> Route | None:
        """Return the route of a path; None if there is none. `alt` is the format that its query asks for."""
        if path in self._fixed:
            return self._fixed[path]
        streams = alt == "sse"
        end = _STREAM if streams else _GENERATE
        for version in _VERSIONS if "gemini" in self._protocols else ():
            if path.startswith(f"{version}/models/") and path.endswith(end):
                return self._chat(PROTOCOLS["gemini"], path[len(version) + 8 : -len(end)], streams=streams)
        return None

    def lister(self, path: str) -> Protocol | None:
        """Return the protocol that lists the models at a path; None if there is no list."""
        if path == "/v1beta/models":
            return PROTOCOLS["gemini"] if "gemini" in self._protocols else None
        return PROTOCOLS[self._protocols[0]] if path == "/v1/models" else None

    def _chat(self, protocol: Protocol, model: str = "", *, streams: bool | None = None) -> Route:
        def reply(call: JudgeCall, answers: Sequence[Answer], fault: FaultKind | None, number: int) -> JudgeReply:
            completion = _completion(call, answers[0], fault)
            return JudgeReply(protocol.reply(completion, call, number), completion.tokens)

        return Route(protocol, lambda body: protocol.read(body, self._models, model), reply, streams)


def _completion(call: JudgeCall, answer: Answer, fault: FaultKind | None) -> Completion:
    verdict = as_verdict(call, answer)
    if fault is not None and fault.stage == "verdict":
        return faulty_verdict(fault, call, verdict)
    return Completion(verdict if isinstance(verdict, str) else dump_verdict(verdict)).cut(call.max_tokens)
