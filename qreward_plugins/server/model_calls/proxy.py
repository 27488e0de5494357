"""Answers clients' own requests over the sources of an engine.

The body goes to a source as it came, but for the model, and the reply comes back as the source sent it. The client's
key never leaves, and the source's key never comes back. What the scheduler gave up becomes an error in the client's own
form, with cause and reason, never a made-up answer. Nothing is recorded in the journal.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from ...config import Config, sources_for_model
from ...errors import EngineError, InputError
from ...samples import Sample
from ...scheduling.batches import Batch
from ...scheduling.calls import Answer, Call, Unanswered
from ...scheduling.dispatcher import Dispatcher
from ...scheduling.planner import Choice, strategy
from ...scheduling.upstream import Upstream
from ...secrets import one_line
from ...sources import Reply, Request
from ...sources.passed_requests import PassedRequest, RawReply, forwarded_headers, parsed_body
from .exchange import Exchange, Pieces
from .formats import FORMATS, GEMINI, Format, client_format, format_of

if TYPE_CHECKING:
    from ...engine import RewardEngine

DEFAULT_COMPLETION_TOKENS = 4096
"""Completion tokens that are reserved for a request that does not bound its completion."""
NAME = "client"
"""The name of the calls in events, where others have the name of their judge."""
NO_RETRY = {"x-should-retry": "false"}
"""Tells the SDKs of OpenAI and Anthropic not to ask again: the scheduler has done that."""
CALLS_A_BATCH = 64
"""Calls that share a budget of hedges. Each on its own would have one of at least 4."""
_SHOWN_CHARS = 200
"""Most characters of a model or a path in a message."""
_STATUSES = {"deadline": 504, "invalid": 502, "garbage": 502, "input": 400, "refused": 400}
_CAUSES = {"invalid": "verdict", "input": "policy", "refused": "policy"}


@dataclass(frozen=True)
class ClientRequest:
    """A request of a client. `path` is without the query. Names of `headers` are in any case. `read_timeout_s`: most
    seconds that the client waits for the next part of its reply; None: any number.
    """

    method: str
    path: str
    headers: Mapping[str, str] = field(repr=False)
    body: bytes = field(repr=False)
    read_timeout_s: float | None = None


@dataclass(frozen=True)
class ClientReply:
    """The reply to a client: `body`, or `pieces` of a stream, which the caller has to read or close."""

    status: int
    headers: Mapping[str, str]
    body: bytes = field(default=b"", repr=False)
    pieces: Pieces | None = field(default=None, repr=False)


@dataclass(frozen=True)
class Group:
    """The sources for one request. `choose` is the strategy of the group; None: that of the engine."""

    sources: tuple[str, ...]
    choose: Choice | None = None


class ModelGroups:
    """Finds the group of a model. The strategy of a group has one state for all its requests."""

    def __init__(self, config: Config, upstreams: Mapping[str, Upstream]) -> None:
        self._config = config
        self._upstreams = upstreams
        self._choices = {
            id(group): None if group.strategy is None else strategy(group.strategy) for group in config.models.values()
        }

    def find(self, model: str, dialects: Sequence[str]) -> tuple[Group | None, bool]:
        """Return the sources that answer for `model` and speak one of `dialects`; None if there is none. And whether
        any source answers for the model.
        """
        names, route = sources_for_model(self._config, model)
        able = tuple(name for name in names if name in self._upstreams and self._speaks(name, dialects))
        if not able:
            return None, bool(names)
        return Group(able, None if route is None else self._choices[id(route)]), True

    def _speaks(self, name: str, dialects: Sequence[str]) -> bool:
        passes: Sequence[str] = getattr(self._upstreams[name].source, "passes", ())
        return not set(passes).isdisjoint(dialects)

    def models(self) -> tuple[str, ...]:
        """The names and patterns of models that clients may ask for, and the models of sources that match one."""
        answering = [each.source.model for each in self._upstreams.values() if getattr(each.source, "passes", ())]
        if self._config.models:
            answering = [model for model in answering if sources_for_model(self._config, model)[0]]
        return tuple(dict.fromkeys([*self._config.models, *answering]))


class Proxy:
    """Answers clients over the sources of `engine`, in the engine's event loop."""

    def __init__(self, engine: RewardEngine) -> None:
        self.engine = engine
        self._of = engine.config
        self._known_groups = ModelGroups(engine.config, engine.upstreams)
        self._dispatcher: Dispatcher | None = None
        self._batch: Batch | None = None

    @property
    def _groups(self) -> ModelGroups:
        if self._of is not self.engine.config:  # it was reloaded
            self._of = self.engine.config
            self._known_groups = ModelGroups(self._of, self.engine.upstreams)
        return self._known_groups

    async def answer(self, incoming: ClientRequest) -> ClientReply:
        """Return the reply. Errors are replies, too, in the form of the client.

        Raises only `TimeoutError`, if nothing comes within the client's read timeout. Cancelling ends the attempts.
        """
        form = client_format(incoming.path, incoming.headers)
        try:
            if incoming.method == "GET" and (found := self._listed(incoming.path, form)) is not None:
                return found
            return await self._forward(incoming, form)
        except InputError as error:
            return refusal(form, 400, str(error), reason="input")
        except EngineError as error:
            return refusal(form, 503, str(error), cause="infra", reason="closed")

    def _listed(self, path: str, form: Format) -> ClientReply | None:
        if not path.endswith("/models"):
            return None
        models = self._groups.models()
        if form is GEMINI:
            return _json(200, {"models": [{"name": f"models/{name}", "displayName": name} for name in models]})
        return _json(200, {"object": "list", "data": [*map(_model, models)], "has_more": False})

    async def _forward(self, incoming: ClientRequest, form: Format) -> ClientReply:
        found = format_of(incoming.path)
        if found is None:
            known = ", ".join((*(each.path for each in FORMATS), "/models"))
            path = one_line(incoming.path, _SHOWN_CHARS)
            detail = f"{incoming.method} {path} is not passed on; the paths that are end in {known}"
            return refusal(form, 404, detail, reason="path")
        if incoming.method != "POST":
            return refusal(form, 405, f"{incoming.path} takes POST", reason="path")
        body = parsed_body(incoming.body)
        model = form.model_of(incoming.path, body)
        group, known_model = self._groups.find(model, form.dialects)
        if group is None:
            return self._no_model(form, model, speaks=known_model)
        problem = form.refusal(body) or self._state_problem(form, body, group)
        if problem:
            return refusal(form, 400, problem, reason="state")
        return await self._call(incoming, form, body, group)

    def _state_problem(self, form: Format, body: Mapping[str, Any], group: Group) -> str:
        key = form.state(body)
        # A source with several keys stands here once for each: they may be those of several accounts.
        if not key or len(group.sources) == 1:
            return ""
        return (
            f"{key!r} refers to what one account keeps, and this model has several sources or keys; name a model that "
            "has one source with one key"
        )

    def _no_model(self, form: Format, model: str, *, speaks: bool = False) -> ClientReply:
        models = ", ".join(self._groups.models()) or "none"
        named = repr(one_line(model, _SHOWN_CHARS))
        what = f"no source of the model {named} speaks this format ({form.path})" if speaks else f"no model {named}"
        return refusal(form, 404, f"{what}; models: {models}", reason="model_not_found")

    async def _call(self, incoming: ClientRequest, form: Format, body: dict[str, Any], group: Group) -> ClientReply:
        deadline_s = self.engine.config.engine.deadline_s
        streams = form.streams(incoming.path, body)
        headers = forwarded_headers(incoming.headers)
        dispatcher = self.engine.dispatcher()
        exchange = Exchange(dispatcher, self._next_batch(dispatcher))
        passed = PassedRequest(body, headers, streams, len(group.sources) == 1, exchange)
        request = Request(Sample([], ""), max_completion_tokens=DEFAULT_COMPLETION_TOKENS, judge=NAME, passed=passed)
        call: Call[Any] = Call(
            group.sources,
            lambda attempt: request,
            _raw,
            NAME,
            on_text=exchange.add if streams else None,
            once=form.changes_something(body),
            refusal_ends=True,
            choose=group.choose,
        )
        within_s = deadline_s
        if incoming.read_timeout_s is not None and not streams:
            within_s = min(within_s, incoming.read_timeout_s)
        try:
            exchange.start(call, dispatcher.now() + within_s)
            await exchange.first(incoming.read_timeout_s)
        except (TimeoutError, asyncio.CancelledError):
            exchange.drop()
            raise
        if exchange.unanswered is not None and exchange.head is None:
            if exchange.unanswered.reason == "deadline" and within_s < deadline_s:
                raise TimeoutError
            return _failed(form, exchange.unanswered, exchange.refusal)
        if exchange.head is not None:
            pieces = Pieces(exchange, incoming.read_timeout_s)
            return ClientReply(exchange.head.status, exchange.head.headers, pieces=pieces)
        answer: Answer[Any] | None = exchange.answer
        assert answer is not None, "a call that is over has an answer or has none"
        raw: RawReply = answer.value
        return ClientReply(raw.status, raw.headers, raw.body)

    def _next_batch(self, dispatcher: Dispatcher) -> Batch:
        """Return the batch of the next call. It is never sealed: it is no batch of samples, and has no report."""
        if dispatcher is not self._dispatcher or self._batch is None or self._batch.jobs >= CALLS_A_BATCH:
            self._dispatcher, self._batch = dispatcher, dispatcher.batches.new(())
        return self._batch


def refusal(
    form: Format,
    status: int,
    message: str,
    *,
    reason: str,
    cause: str = "policy",
    headers: Mapping[str, str] = NO_RETRY,
) -> ClientReply:
    """Return an error in the form of a client."""
    return _json(status, form.error(status, message, cause, reason), headers)


def _failed(form: Format, why: Unanswered, refused: RawReply | None) -> ClientReply:
    """Return the error for a call that has no answer."""
    if why.reason == "refused" and refused is not None:
        return ClientReply(refused.status, {**refused.headers, **NO_RETRY}, refused.body)
    status, cause = _STATUSES.get(why.reason, 503), _CAUSES.get(why.reason, "infra")
    detail = f"{cause}/{why.reason}: {why.detail}" if why.detail else f"{cause}/{why.reason}"
    return refusal(form, status, detail, reason=why.reason, cause=cause)


def _json(status: int, value: Any, headers: Mapping[str, str] = {}) -> ClientReply:
    return ClientReply(status, {"content-type": "application/json", **headers}, json.dumps(value).encode())


def _model(name: str) -> dict[str, Any]:
    """Return what a list of models says of one, in the form that the clients of OpenAI and Anthropic read."""
    return {"id": name, "object": "model", "type": "model", "display_name": name, "created": 0, "owned_by": "qreward"}


def _raw(request: Request, reply: Reply) -> Any:
    return reply.value
