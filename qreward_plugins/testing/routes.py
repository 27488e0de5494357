"""The routes of a judge server: its protocols, scores and programs.

Each has its own requests and replies; limits, latency, faults and the report are shared.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from .faults import FaultKind
from .faulty_answers import faulty_verdict
from .judge_calls import (
    Answer,
    Completion,
    Content,
    JudgeCall,
    Refused,
    as_verdict,
    dump_verdict,
)
from .protocols import PROTOCOLS, Protocol
from .protocols.reward_models import WIRES, RewardCall, read_rewards, reward_content
from .sandbox import RUN_PATH, read_run_call, run_content
from .scores import read_score_call, score_content
from .streamed_replies import wants_stream

CHAT_PATH = "/v1/chat/completions"
SCORE_PATH = "/score"
_PATHS = {"openai": CHAT_PATH, "responses": "/v1/responses", "anthropic": "/v1/messages"}
_GENERATE = ":generateContent"
_STREAM = ":streamGenerateContent"
_SSE = "sse"
_VERSIONS = ("/v1beta", "/v1")


@dataclass(frozen=True)
class Route:
    """One path. `read` reads a request and raises `Refused` for the client's mistakes. `content` turns the scorer's
    answers, one for each text of the request, into content, with a fault of the stage "verdict" or "list" applied; it
    raises `TypeError` for an invalid answer. `protocol` writes errors and limits.
    """

    read: Callable[[bytes], JudgeCall]
    content: Callable[[JudgeCall, Sequence[Answer], FaultKind | None], Content]
    protocol: Protocol
    is_stream: bool = False
    """Whether the path itself asks for a stream."""

    def stream_options(self, body: bytes) -> Mapping[str, Any] | None:
        """Return the `stream_options` of a request that asks for a stream; None for one that does not."""
        if self.is_stream:
            return {}
        # Gemini has no such key, and services that score or run programs do not stream.
        asks = self.content not in (_scores, _runs) and self.protocol.name != "gemini"
        return wants_stream(body) if asks else None


class Routes:
    """The routes of a server of these models. `protocols` are names in `PROTOCOLS`; raises `ValueError` for others."""

    def __init__(self, models: Sequence[str], protocols: Sequence[str]) -> None:
        unknown = [name for name in protocols if name not in PROTOCOLS]
        if unknown or not protocols:
            raise ValueError(f"a judge server needs protocols among {', '.join(PROTOCOLS)}, not {', '.join(unknown)!r}")
        self._models = tuple(models)
        self._protocols = tuple(protocols)
        first = models[0] if models else ""
        chat = PROTOCOLS["openai"]
        self._fixed = {_PATHS[name]: self._route(PROTOCOLS[name]) for name in protocols if name in _PATHS}
        for path in (*WIRES, SCORE_PATH):
            self._fixed[path] = Route(partial(self._read_scored, path, first), _scores, chat)
        self._fixed[RUN_PATH] = Route(read_run_call, _runs, chat)

    @property
    def paths(self) -> tuple[str, ...]:
        """The paths, for messages."""
        generate = tuple(f"/v1beta/models/MODEL{end}" for end in (_GENERATE, f"{_STREAM}?alt={_SSE}"))
        generate = generate if "gemini" in self._protocols else ()
        return (*self._fixed, *generate)

    def find(self, path: str, alt: str = "") -> Route | None:
        """Return the route of a path; None if there is none. `alt` is the format that its query asks for."""
        if path in self._fixed:
            return self._fixed[path]
        for version in _VERSIONS if "gemini" in self._protocols else ():
            end = _STREAM if alt == _SSE else _GENERATE
            if path.startswith(f"{version}/models/") and path.endswith(end):
                return self._route(PROTOCOLS["gemini"], path[len(version) + 8 : -len(end)], is_stream=end == _STREAM)
        return None

    def lister(self, path: str) -> Protocol | None:
        """Return the protocol that lists the models at a path; None if there is no list."""
        if path == "/v1beta/models":
            return PROTOCOLS["gemini"] if "gemini" in self._protocols else None
        return PROTOCOLS[self._protocols[0]] if path == "/v1/models" else None

    def _read_scored(self, path: str, model: str, body: bytes) -> JudgeCall:
        call = read_rewards(path, body, self._models) if path in WIRES else None
        if call is not None:
            return call
        if path == SCORE_PATH:
            return read_score_call(body, model)
        raise Refused(400, f"{path} needs one of the keys {', '.join(sorted({wire.key for wire in WIRES[path]}))}")

    def _route(self, protocol: Protocol, model: str = "", *, is_stream: bool = False) -> Route:
        def content(call: JudgeCall, answers: Sequence[Answer], fault: FaultKind | None) -> Content:
            completion = _completion(call, answers[0], fault)
            return Content(completion.tokens, partial(protocol.reply, completion))

        return Route(lambda body: protocol.read(body, self._models, model), content, protocol, is_stream)


def _completion(call: JudgeCall, answer: Answer, fault: FaultKind | None) -> Completion:
    verdict = as_verdict(call, answer)
    if fault is not None and fault.stage == "verdict":
        return faulty_verdict(fault, call, verdict)
    return Completion(verdict if isinstance(verdict, str) else dump_verdict(verdict)).cut(call.max_tokens)


def _scores(call: JudgeCall, answers: Sequence[Answer], fault: FaultKind | None) -> Content:
    return reward_content(call, answers, fault) if isinstance(call, RewardCall) else score_content(answers[0], fault)


def _runs(call: JudgeCall, answers: Sequence[Answer], fault: FaultKind | None) -> Content:
    return run_content(call, answers[0], fault)
