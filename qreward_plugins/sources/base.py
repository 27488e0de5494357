"""Defines `Source`, `Request` and `Reply`: a source answers one request, or raises one `SourceError`.

A source knows only how to talk to its endpoint. Quotas decide when it is asked, the scheduler decides what follows a
failure, and judges decide what the answer means.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar

from ..quotas.tokens import Demand, Texture, of_messages
from ..samples import Message, Sample
from ..samples.images import EncodedImage
from ..samples.json_values import encoded
from ..samples.spent import Usage

if TYPE_CHECKING:
    from ..config.source_models import Batch
    from ..errors import QRewardError
    from ..observers import ReplicaChanged
    from ..observers.statistics import ReplicaStatistics
    from .dialects.base import Refusal
    from .passed_requests import PassedRequest


# Not frozen: it is made for every attempt, and a frozen one takes three times as long. Nobody changes one.
@dataclass(slots=True)
class Request:
    """One question to one source.

    Language models get `messages` and `parameters` (further keys of the body: max_tokens, response_format, ...). The
    content of a message is a text, or a list of parts as in chat completions: `{"type": "text", "text": ...}` and
    `{"type": "image_url", "image_url": {"url": ...}}`, whose `url` is an `EncodedImage` (or, if the user allows it, an
    http URL). A source whose server has another form of parts translates them.
    Functions and scoring services get `sample`. `nonce` binds the reply to this request; in the messages it comes after
    what the siblings of a group share, so that servers can cache that. `shared_nonce` is that of fences around texts
    which they share; "" for none. `max_completion_tokens` is the most tokens that the reply may take, for the quota; 0
    if the source counts no tokens. `judge` is the name of the judge. `cut` is true if a text of the sample was too long
    and lost its middle. Neither `judge` nor `cut` is sent.
    """

    sample: Sample
    messages: tuple[Message, ...] = ()
    parameters: Mapping[str, Any] = field(default_factory=dict)
    nonce: str = ""
    shared_nonce: str = field(default="", kw_only=True)
    max_completion_tokens: int = 0
    judge: str = ""
    cut: bool = False
    thinking_tokens: int = 0
    """Tokens that a source whose model thinks adds to `max_tokens`, because the judge's own number is a default for
    models that do not. 0: none."""
    on_text: Callable[[str], None] | None = field(default=None, repr=False, compare=False)
    """Called with each further piece of the answer, without thoughts, by a source whose reply is streamed. All
    pieces so far, joined, are a prefix of `Reply.text`. It does not raise. It is not sent. None: nobody reads the
    pieces."""
    refusal: object | None = field(default=None, repr=False, compare=False)
    """What the servers of this source that were asked by earlier requests of the same call did: it asks another one. It
    is the last `PermanentError.refusal`, or what `Reply.on_judged` returned. It is not sent. None: it is the first
    request, or none refused it or answered invalidly."""
    passed: PassedRequest | None = field(default=None, repr=False)
    """A client's own request, which is sent instead of everything else here, to sources with `passes`."""
    size: int = field(init=False, repr=False, compare=False)
    """Length of the messages in UTF-8 bytes; the assumed tokens of images count as bytes. Without messages: length of
    the sample's prompt, response and ground truth, as far as these are texts. The scheduler predicts latency and tokens
    from it."""
    _demands: dict[str, Demand] | None = field(default=None, init=False, repr=False, compare=False)
    """The demand at each source that was asked for, by name."""

    def __post_init__(self) -> None:
        if self.passed is not None:
            self.size = self.passed.texture.size
            return
        texts = [message["content"] for message in self.messages] or _texts(self.sample)
        try:
            size = sum(map(_utf8_bytes, texts))
        except TypeError:
            # Only messages with images have a content that is no text.
            shown, images, _ = of_messages(self.messages)
            size = images + sum(map(_utf8_bytes, shown))
        self.size = size

    def demand(self, source: Source) -> Demand:
        """Return an upper bound on the tokens that this request takes at `source`.

        It is computed from the body that the source would send. If the source cannot compute it, it follows from the
        messages and `max_completion_tokens`. It is computed once: the scheduler asks several times for each attempt.
        """
        found = None if self._demands is None else self._demands.get(source.name)
        if found is None:
            try:
                found = source.demand(self)
            except Exception:  # called by the scheduler, which no source and no sample may stop
                found = None
            if found is None:
                shown = of_messages(self.messages) if self.messages else (_texts(self.sample), 0, 0)
                texts, images, overhead = shown
                found = Demand(Texture.of(texts, images=images), overhead, self.max_completion_tokens)
            if self._demands is None:
                self._demands = {source.name: found}
            else:
                self._demands[source.name] = found
        return found


def _utf8_bytes(text: str) -> int:
    return len(text) if str.isascii(text) else len(str.encode(text, "utf-8", "surrogatepass"))


def _texts(sample: Sample) -> list[str]:
    """Return the texts of a sample; other values are skipped."""
    given = [sample.response, sample.ground_truth]
    return [*(str.__str__(text) for text in given if issubclass(type(text), str)), *texts_in(sample.messages)]


def texts_in(messages: Iterable[Any]) -> Iterator[str]:
    """Yield the texts of messages. Other values are skipped: data sets do not hold only texts in messages."""
    for message in messages:
        content = message.get("content", message.get("parts")) if isinstance(message, Mapping) else None
        for part in content if isinstance(content, (list, tuple)) else [content]:
            text = part.get("text") if isinstance(part, Mapping) else part
            # `isinstance` reads `__class__`, which may raise for a foreign object; `type` never does.
            if issubclass(type(text), str):
                yield str.__str__(text)


Logprobs = tuple[tuple[str, tuple[tuple[str, float], ...]], ...]
"""Tokens, each with the most likely ones at its place and their natural log probabilities."""


@dataclass(frozen=True, slots=True)
class ServedWeights:
    """The weights of a server: `version` is the name that the caller of the update gave, `identity` is equal for equal
    weights. Both are "" for the configured model.
    """

    version: str = ""
    identity: str = ""


# Not frozen, as `Request`.
@dataclass(slots=True)
class Reply:
    """The answer of a source to one request.

    `text` is the text of a language model; `value` is the value of a function or a service. Neither is trusted.
    `thinking` holds the thoughts of a model, if the server states them apart from its answer; no verdict is read there.
    `announced` holds the limits that the source states, if any (`requests_per_window`, `requests_remaining`,
    `requests_reset_s`, and the same for `tokens`).

    `text` and `value` are not redacted, because a verdict may contain a word that is also a secret of the source.
    `clean` redacts the source's secrets; apply it to every text of the reply that is shown or kept. None: the source
    has no secrets.
    """

    text: str = ""
    value: Any = None
    usage: Usage | None = None
    usage_doubted: bool = False
    """Whether the source stated an impossible usage, which was reduced in `usage`."""
    model: str = ""
    finish_reason: str = ""
    announced: Mapping[str, float] = field(default_factory=dict)
    clean: Callable[[str], str] | None = field(default=None, repr=False, compare=False)
    thinking: str = field(default="", repr=False)
    first_token_s: float | None = None
    """Seconds from sending the request to the first token, if the reply was streamed."""
    weights: ServedWeights | None = None
    """The weights that gave the reply; None if the source does not know them."""
    logprobs: Logprobs = field(default=(), repr=False)
    """The first tokens of the text, each with the most likely tokens at its place; empty unless they were asked for."""
    on_judged: Callable[[bool, float], object | None] | None = field(default=None, repr=False, compare=False)
    """Tells a source with several servers whether the reply was valid, with the event loop's time in seconds. Returns
    the `Request.refusal` with which the next request of the call asks another server."""

    def cleaned(self, text: str) -> str:
        """Return `text`, which stands in this reply, with the source's secrets redacted."""
        return text if self.clean is None else self.clean(text)


class Source(ABC):
    """An endpoint or a local function that answers requests. A source defines `name`, `model` and `send`; everything
    else has a default. One that a configuration opens inherits `SourceKind`.
    """

    name: str
    model: str
    """The model, the function's path, or the address of a service, for messages and metrics."""

    slots: int | None = None
    """How many requests it handles at once in this process; None: as many as its limits allow."""

    local: bool = False
    """Whether it works in processes or threads of this machine. If a local call hangs, the sample is at fault and not
    the source. `qreward plan` adds no network and no tokens for a local source."""

    batch: Batch | None = None
    """How many calls one request may carry; None: one. A source with a `batch` defines `send_batch`."""

    passes: tuple[str, ...] = ()
    """The dialects of clients' own requests (`Request.passed`) that it sends on."""

    colocated: bool = False
    """Whether its servers use the devices of the trainer."""

    answers: ClassVar[tuple[str, ...]] = ()
    """The types of answer that it gives; empty: any."""

    has_servers: ClassVar[bool] = False
    """Whether it starts servers of its own. Such a source has `spec` (a `PoolSpec`) and `replicas` (the `ReplicaState`
    of each)."""

    @abstractmethod
    async def send(self, request: Request, *, on_sent: Callable[[], None]) -> Reply:
        """Send the request once, and return the reply.

        Raises a `SourceError`, or `InvalidReply` for an answer that cannot be a verdict: the model or a content filter
        refused, or the value of a service is not JSON. A source with several servers says by `PermanentError.refusal`
        that another one may answer a request that this one refused. It is asked once
        more, with `Request.refusal`.

        Calls `on_sent` when the request is written to the connection, because a server's limits count from then on; a
        local source calls it before it starts. Only connecting has a time limit here: the scheduler cancels an attempt
        that takes too long. A cancelled call frees its connection, process or thread slot before it returns.
        """

    async def send_batch(
        self, requests: Sequence[Request], *, on_sent: Callable[[], None]
    ) -> Sequence[Reply | QRewardError]:
        """Send several requests as one, and return a reply or an error for each, in order. If it raises, none of them
        was answered; it raises what `send` raises, and `InvalidReply` if the results cannot be matched to the requests.
        A single request goes to `send`.
        """
        raise NotImplementedError

    async def aclose(self) -> None:  # noqa: B027 -- a default
        """Close connections and workers. Idempotent. Default: does nothing."""

    # Before the first call

    @property
    def started(self) -> bool:
        """Whether `start` has done its work, or has none."""
        return True

    async def start(self) -> None:  # noqa: B027 -- a default
        """Called before the first samples, if `started` is False; may be called again. Raises `ConfigurationError` or
        `ReplicasNotStarted`.
        """

    # What a request is

    def question(self, request: Request) -> object | None:
        """Return the identity of the source and all that is sent, without the nonce (`apart`), for the journal's key.
        If it is None, or the journal cannot encode it, the answer is never used again.

        Default: the name of the source, which may answer differently from another one, and everything in the request.
        """
        return (self.name, self.model, *sent_of(request))

    @property
    def weights(self) -> ServedWeights:
        """The weights that it has now. Default: those of the configuration."""
        return ServedWeights()

    def question_of(self, request: Request, weights: ServedWeights | None) -> object | None:
        """Return what `question` returns while the source has these weights (`Reply.weights`)."""
        return self.question(request)

    def identity(self, request: Request) -> object | None:
        """Return what identifies the answer of this model wherever it is served. Default: `question`, which may hold an
        address.
        """
        return self.question(request)

    def written(self, *requests: Request) -> str | None:
        """Return the body in which these requests were sent, as a text without secrets, for the journal and `qreward
        check --prompt`. None (default): the journal keeps the messages and the judge's parameters.
        """
        return None

    def demand(self, request: Request) -> Demand | None:
        """Return the most tokens that the body of a request may take. None (default): it follows from the messages."""
        return None

    def unmet(self, asked: Mapping[str, Any], *, thinking_tokens: int = 0) -> Sequence[Refusal]:
        """Return the parameters of a judge that this source would not send, each with the reason. `asked` are those of
        its requests, and `thinking_tokens` is that of its requests. Default: it sends everything.
        """
        return ()

    # How it is

    def held(self) -> str:
        """Return why it takes no calls for a while, although it has not failed; "" if it takes them. Calls wait
        meanwhile.
        """
        return ""

    def listen(self, notify: Callable[[], None]) -> None:  # noqa: B027 -- a default
        """Have `notify` called, from any thread, whenever `held` or its servers may have changed."""

    def changes(self) -> Sequence[ReplicaChanged]:
        """Return the changes since the last call. It is called in the event loop, after `notify`."""
        return ()

    def replica_statistics(self, now: float) -> Sequence[ReplicaStatistics]:
        """Return the statistics of each replica, for a source with several servers; `now` is the event loop's time in
        seconds.
        """
        return ()


def sent_of(request: Request) -> tuple[object, ...]:
    """Return everything in a request, without its nonce."""
    messages = [
        [(key, content_apart(text, request.nonce)) for key, text in message.items()] for message in request.messages
    ]
    return messages, dict(request.parameters), None if request.messages else request.sample


def content_apart(content: Any, nonce: str) -> object:
    """Split the content of a message at every `nonce`, as `apart` does; an image is replaced by its identity."""
    return apart(content if isinstance(content, str) else encoded(content, image=identity_of).decode(), nonce)


def identity_of(image: EncodedImage) -> str:
    """Return the text that stands for an image in the journal's key."""
    return image.identity


def apart(text: str, nonce: str) -> tuple[str, ...]:
    """Split `text` at every occurrence of `nonce`, so that the parts do not depend on the nonce. With an empty `nonce`
    there is one part, the whole text.
    """
    return tuple(text.split(nonce)) if nonce else (text,)
