"""Defines `Endpoint`, the base class of every source over HTTP: replicas, key, headers, sending, errors.

The constructor checks the whole configuration and reports all mistakes at once. `send` only encodes, posts (`http`) and
reads (`replies`). What differs from kind to kind are the methods from `body` to `streaming`.
"""

from __future__ import annotations

import asyncio
import json
from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar

from yarl import URL

from ..config.source_models import EndpointConfig
from ..errors import ConfigurationError, Mistake, QRewardError, SampleRefused, SourceError, SourceHeld
from ..observers.statistics import ReplicaStatistics
from ..quotas.tokens import Demand, Texture, of_messages
from ..secrets import Redactor, masked, names_secret, secrets_in
from .base import Reply, Request, apart, identity_of
from .bodies import BodyWriter, Lists, ParameterDemands, completion_bound
from .endpoint_settings import (
    MOST_CONNECTIONS,
    bound_mistakes,
    has_header,
    open_client,
    read_headers,
    read_parameters,
    read_urls,
)
from .http import HTTPReply
from .kind import Provider, SourceKind, class_path, http_provider
from .replicas import NO_HINTS, Lease, Replicas, RoutingHints, TriedReplicas
from .replies import Answer
from .routing import BYTES_PER_TOKEN, CacheUse, shared_prefix
from .streams import EventSink, StreamReader


class Endpoint(SourceKind):
    """A source that is asked by POST, at one URL or at several replicas that share its limits.

    A kind defines the protocol: `answers`, `ANSWER`, `body`, and what of path, headers and body differs from the
    defaults. `Config` has the key `url: URLs`, or the key that its `URL_KEY` names. This class does the rest: replicas,
    the key, TLS, proxies of the environment (`HTTPS_PROXY`, `HTTP_PROXY`, `NO_PROXY`; `~/.netrc` is not read), the size
    limit of replies, errors by status, `Retry-After`, and redaction of secrets.

    `name` is its name in the configuration. `mistakes` are the mistakes that the kind found in `config`. `path`
    replaces `PATH` if the path depends on the configuration; `stream_path` is that of streamed replies, if it is
    another one.

    Raises ConfigurationError with `mistakes` and those that depend on the environment: an unset variable for the key,
    a URL or header that cannot be sent.
    """

    Config: ClassVar[type[EndpointConfig]] = EndpointConfig

    REQUIRED = ("answers", "ANSWER")

    ANSWER: ClassVar[type[Answer]]
    """The class that reads a reply."""
    PATH: ClassVar[str] = ""
    """The path that is appended to each URL."""
    KEY_HEADER: ClassVar[tuple[str, str]] = ("Authorization", "Bearer ")
    """The name of the header that carries the key, and the text before the key in its value."""
    HEADERS: ClassVar[Mapping[str, str]] = {}
    """Further headers of every request. They are not secret, and headers of the configuration override them."""

    usual_latency_s = 0.5

    bound_key: tuple[str, ...] = ("max_tokens",)
    """The path of the key in the body that bounds a completion."""
    containers: tuple[str, ...] = ()
    """The keys of the body that hold several settings, which `parameters` change one by one."""
    _in_lists = False
    """Whether a single request is sent as several are."""

    @abstractmethod
    def body(self, request: Request) -> Mapping[str, Any]:
        """Return the body of a request, without the configured parameters. Raises `InputError` for a value that JSON
        cannot hold.
        """

    @classmethod
    def provider(cls, config: Any, environment: Mapping[str, str]) -> Provider:
        """Return what the provider counts requests by: the URLs, the model, the key and the headers."""
        return http_provider(config, environment, cls.key_header(config))

    @classmethod
    def key_header(cls, config: Any) -> tuple[str, str]:
        """Return the name of the header that carries the key, and the text before the key. Default: `KEY_HEADER`."""
        return cls.KEY_HEADER

    @classmethod
    def plain_headers(cls, config: Any) -> Mapping[str, str]:
        """Return the headers of every request that are not secret. Default: `HEADERS`."""
        return cls.HEADERS

    def prompt(self, body: dict[str, Any]) -> tuple[list[str], int, int]:
        """Remove the prompt from a body. Return its texts, the tokens of its images, and those of the chat template and
        of other parts. Default: the chat messages.
        """
        messages = body.pop("messages", None)
        return of_messages(messages) if isinstance(messages, (list, tuple)) else ([], 0, 0)

    def completion_bound(self, body: Mapping[str, Any]) -> int | None:
        """Return the most completion tokens that a body allows; None if it sets no bound."""
        return completion_bound(body)

    @property
    def lists(self) -> Lists | None:
        """How its server takes several calls in one request; None (default): it takes one. A kind that defines it has
        the key `batch: Batch | None = None` in its `Config`.
        """
        return None

    @property
    def reads(self) -> object:
        """The settings that change how replies are read, for the journal's key. Default: None, there are none."""
        return None

    def streaming(self, request: Request) -> StreamReader | None:
        """Return how the reply to `request` is streamed. Default: None, it is not."""
        return None

    def __init__(
        self,
        name: str,
        config: EndpointConfig,
        *,
        mistakes: Sequence[Mistake] = (),
        path: str | None = None,
        stream_path: str | None = None,
    ) -> None:
        super().__init__(name, config)
        self._reads_with: Callable[..., Answer] = self.ANSWER
        self._url_key = config.URL_KEY
        self._max_reply_bytes = config.max_reply_bytes
        found: list[Mistake] = []
        path_of_parameters = f"sources.{name}.parameters"
        parameters = read_parameters(path_of_parameters, config, found)
        found += bound_mistakes(path_of_parameters, config, self.bound_key, self.containers, self.completion_bound)
        headers = read_headers(f"sources.{name}", config, self.key_header(config), found)
        self._paths = (self.PATH if path is None else path, stream_path)
        self._urls = read_urls(f"sources.{name}.{config.URL_KEY}", config.urls, self._paths[0], found)
        if found or mistakes:
            raise ConfigurationError([*found, *mistakes])
        self._stream_urls = self._urls if stream_path is None else {url: URL(url + stream_path) for url in self._urls}
        self.replicas_asked = Replicas(config.urls, config.routing, name=name)
        """The replicas that requests go to."""
        self._cache_use = CacheUse(verify_tls=config.verify_tls) if "kv_cache" in config.routing else None
        self._parameter_demands = ParameterDemands(self.completion_bound)
        plain = {key: value for key, value in self.plain_headers(config).items() if not has_header(headers, key)}
        self._identity = (
            class_path(self),
            config.version or tuple(sorted(self._urls)),
            sorted((key.lower(), value) for key, value in {**plain, **headers}.items() if not names_secret(key)),
        )
        self._http = open_client(
            name,
            config,
            {*self._urls.values(), *self._stream_urls.values()},
            headers,
            plain_headers=plain,
            secrets=tuple(secrets_in(config.parameters)),
        )
        self._marked = config.parameters if any(secrets_in(config.parameters)) else {}
        self._bodies = BodyWriter(name, self.body, parameters, self.containers, redact=self._http.redactor.of)
        self.slots = MOST_CONNECTIONS if config.client == "httpx" else None

    @property
    def redactor(self) -> Redactor:
        """Redacts all secrets that it sends."""
        return self._http.redactor

    def move(self, urls: Sequence[str]) -> None:
        """Send further requests to these replicas. What is known of those that stay is kept. Their servers belong to
        this machine or job, so they are not asked through a proxy of the environment.
        """
        path, stream_path = self._paths
        self.replicas_asked.move(urls)
        self._urls = {url: URL(url + path) for url in urls}
        self._stream_urls = self._urls if stream_path is None else {url: URL(url + stream_path) for url in urls}

    async def send(self, request: Request, *, on_sent: Callable[[], None]) -> Reply:
        """Send the request once, and return the reply.

        Cancelling closes the connection, so that the server can stop working on the answer.

        Raises a SourceError, or InvalidReply for an answer that cannot be a verdict.
        """
        streaming = self.streaming(request)
        asks = None if streaming is None else streaming.ASKS
        # No coroutine for the usual body: this runs for every request.
        body = self._bodies.text_only(request, asks) or await self._bodies.with_images(request, asks)
        loop = asyncio.get_running_loop()
        url, http, lease = await self._post(loop, [request], body, on_sent, streaming=streaming)
        reply = lease.read(loop.time(), self.answer(url, http).reply)
        return self._finished(reply, lease, http)

    async def send_batch(
        self, requests: Sequence[Request], *, on_sent: Callable[[], None]
    ) -> Sequence[Reply | QRewardError]:
        """Send several requests as one, for a kind that defines `lists`; see `Source`."""
        assert self.lists is not None
        results: list[Reply | QRewardError | None] = [None] * len(requests)
        bodies: dict[int, dict[str, Any]] = {}
        for number, body in enumerate(self._bodies.each(requests)):
            if isinstance(body, SampleRefused):
                results[number] = body
            else:
                bodies[number] = body
        if bodies:
            joined = self._bodies.join(list(bodies.values()), self.lists)
            sent = [requests[number] for number in bodies]
            loop = asyncio.get_running_loop()
            url, http, lease = await self._post(loop, sent, joined, on_sent)
            answer, lists = self.answer(url, http), self.lists
            replies = lease.read(loop.time(), lambda: lists.replies(answer, sent, self))
            for number, reply in zip(bodies, replies, strict=True):
                results[number] = self._finished(reply, lease, http) if isinstance(reply, Reply) else reply
        return [result for result in results if result is not None]

    async def _post(
        self,
        loop: asyncio.AbstractEventLoop,
        requests: Sequence[Request],
        body: bytes,
        on_sent: Callable[[], None],
        *,
        streaming: EventSink | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> tuple[URL, HTTPReply, Lease]:
        """Post the body of these requests to a replica; return the URL, the reply, and the lease, which is released.
        The reply is read by `Lease.read`, which learns what it was. `headers` are sent beside those of the source.
        """
        most = len(requests) * self._max_reply_bytes
        with self.replicas_asked.acquire(loop.time(), self._hints(requests)) as lease:
            url = (self._urls if streaming is None else self._stream_urls)[lease.replica.base_url]
            try:
                http = await self._http.post(
                    url, body, on_sent=on_sent, max_reply_bytes=most, streaming=streaming, headers=headers
                )
            except SourceError as error:
                lease.failed(loop.time(), error)
                raise
            except asyncio.CancelledError:
                if lease.aborted and lease.end_abort():
                    raise SourceHeld(f"source {self._name!r}: its weights are updated, or it is to sleep") from None
                lease.cancelled(loop.time())
                raise
            if http.status >= 500:
                lease.failed(loop.time())
        if lease.mixed:
            # Its server got other weights while it answered.
            raise SourceHeld(f"source {self._name!r}: the weights were changed during the call")
        return url, http, lease

    def _hints(self, requests: Sequence[Request]) -> RoutingHints:
        """Return what the choice of a replica depends on. It is not computed for a source with one URL."""
        if not self.replicas_asked.several:
            return NO_HINTS
        if self._cache_use is not None:
            self._cache_use.refresh(self.replicas_asked.all, asyncio.get_running_loop().time())
        demands = [request.demand(self) for request in requests]
        # The requests of a batch go to one replica; the first of them decides.
        # A call that was tried in vain goes alone.
        tried = requests[0].refusal
        return RoutingHints(
            sum(demand.texture.size // BYTES_PER_TOKEN + demand.overhead for demand in demands),
            sum(demand.completion for demand in demands),
            shared_prefix(requests[0]) if "prefix_aware" in self.replicas_asked.routing else None,
            tried if isinstance(tried, TriedReplicas) else None,
        )

    def replica_statistics(self, now: float) -> tuple[ReplicaStatistics, ...]:
        """Return the statistics of each replica; empty for a source that never had several. `now` is the event loop's
        time in seconds.
        """
        return self.replicas_asked.statistics(now) if self.replicas_asked.were_several else ()

    def _finished(self, reply: Reply, lease: Lease, http: HTTPReply) -> Reply:
        """Count the usage of a reply, redact it, and attach the redactor: a server may echo secrets into rationales and
        component names. `lease`: that of its request, whose weights it is given, and which is told whether the reply
        was valid.
        """
        self.replicas_asked.used(lease.replica, reply.usage)
        if lease.weights is not None:
            reply.weights = lease.weights
        if self.replicas_asked.several:
            reply.on_judged = lease.judged
        if http.streamed:
            reply.first_token_s = http.first_token_s
        if (clean := self._http.redactor.clean) is not None:
            reply.model, reply.finish_reason, reply.clean = clean(reply.model), clean(reply.finish_reason), clean
        return reply

    def question(self, request: Request) -> object:
        """Return the identity of this source and the body that would be sent, for the journal's key.

        The identity includes headers, except credentials: a new key does not change an answer. Raises `SampleRefused`
        if the body cannot be written.
        """
        body = self._bodies.encode(request, image=identity_of)
        return (self._identity, self.reads, apart(body.decode(), request.nonce))

    def identity(self, request: Request) -> object:
        """Return what identifies the answer of this model wherever it is served: the body, and how replies are read.

        Raises `SampleRefused` if the body cannot be written.
        """
        return (class_path(self), self.reads, self._bodies.encode(request, image=identity_of).decode())

    def written(self, *requests: Request) -> str:
        """Write the body again in which these requests were sent, for readers.

        Images are replaced by their identities, and secrets are redacted. Raises `SampleRefused`.
        """
        if self.lists is not None and (self._in_lists or len(requests) > 1):
            bodies = [body for body in self._bodies.each(requests) if isinstance(body, dict)]
            body = self._bodies.join(bodies, self.lists, image=identity_of).decode()
        else:
            streaming = self.streaming(requests[0])
            asks = None if streaming is None else streaming.ASKS
            body = self._bodies.encode(requests[0], image=identity_of, asks=asks).decode()
        if self._marked:
            # Also the short ones, which are no words of a text.
            body = json.dumps(masked(json.loads(body), self._marked), ensure_ascii=False, separators=(",", ":"))
        clean = self.redactor.clean
        return body if clean is None else clean(body)

    async def aclose(self) -> None:
        """Close all connections. Idempotent. After that, `send` raises."""
        if self._cache_use is not None:
            await self._cache_use.aclose()
        await self._bodies.aclose()
        await self._http.aclose()

    def answer(self, url: URL, http: HTTPReply) -> Answer:
        """Return the object that reads the reply of `url`."""
        return self._reads_with(self._name, url, self.model, self._url_key, http, self._http.redactor)

    def demand(self, request: Request) -> Demand | None:
        """Return an upper bound on the tokens of `request`, prompt and completion; None if its body cannot be written,
        in which case it will not be sent.
        """
        try:
            body = self._bodies.whole(request)
            texts, images, overhead = self.prompt(body)
            parameters, completion = self._parameter_demands.of(body)
            return Demand(
                Texture.of(texts, images=images, beside=parameters),
                overhead,
                request.max_completion_tokens if completion is None else completion,
            )
        except Exception:  # values of a sample may raise anything; the attempt fails that sample and gives the reason
            return None
