"""What a source is to the rest of the core: something that answers one request, or raises one `SourceError`.

A source knows how to talk to its endpoint and nothing else: not when it may (quotas), not what to do when it failed
(scheduling), not what the answer means (judges).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from ..samples import Message, Sample
from ..spent import Usage
from .demand import Demand, Texture, of_messages


@dataclass(frozen=True, slots=True)
class Request:
    """What one source is asked.

    `messages` and `parameters` (the body's further keys: max_tokens, response_format, ...) are for sources that talk
    to language models, `sample` for functions and scoring services. `nonce` binds the reply to this request.
    `max_completion_tokens` is the most that the reply may take, for the quota; 0 where tokens play no part. `judge` is
    the name of the judge, and `cut` whether a text of the sample is shown without its middle; neither is sent.
    """

    sample: Sample
    messages: tuple[Message, ...] = ()
    parameters: Mapping[str, Any] = field(default_factory=dict)
    nonce: str = ""
    max_completion_tokens: int = 0
    judge: str = ""
    cut: bool = False
    size: int = field(init=False, repr=False, compare=False)
    """Length of what is sent, in UTF-8 bytes: the scheduler's measure of how long the answer will take, and of how many
    tokens it takes. Without messages it is that of the sample's prompt, response and ground truth, where these are
    texts."""
    _demands: dict[str, Demand] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        texts = [message["content"] for message in self.messages] or _texts(self.sample)
        object.__setattr__(self, "size", sum(len(str.encode(text, "utf-8", "surrogatepass")) for text in texts))
        object.__setattr__(self, "_demands", {})

    def demand(self, source: Source) -> Demand:
        """The most tokens that this request takes at `source`, by the body that the source would send; by the messages
        and `max_completion_tokens` if the source cannot tell.
        """
        found = self._demands.get(source.name)
        if found is None:
            # Checking a protocol costs more than all the rest of this.
            ask: Callable[[Request], Demand | None] | None = getattr(source, "demand", None)
            try:
                found = ask(self) if callable(ask) else None
            except Exception:  # the scheduler asks for it, and must outlive any source and any sample
                found = None
            if found is None:
                texts, overhead = of_messages(self.messages) if self.messages else (_texts(self.sample), 0)
                found = Demand(Texture.of(texts), overhead, self.max_completion_tokens)
            self._demands[source.name] = found
        return found


def _texts(sample: Sample) -> list[str]:
    """The texts of a sample as it is; data sets hold other things, too, in the place of messages and contents."""
    messages: Sequence[Any] = sample.messages
    found = [sample.response, sample.ground_truth]
    for message in messages:
        if isinstance(message, Mapping):
            found += _parts(message.get("content"))
    # By their types, because an object may raise even when it is asked for its class.
    return [str.__str__(text) for text in found if issubclass(type(text), str)]


def _parts(content: Any) -> list[Any]:
    if isinstance(content, (list, tuple)):
        return [part.get("text") for part in content if isinstance(part, Mapping)]
    return [content]


@dataclass(frozen=True, slots=True)
class Reply:
    """What a source answered.

    `text` is what a language model wrote, `value` what a function returned or a service answered; neither is trusted.
    `announced` holds the limits that the source states of itself (`requests_per_window`, `requests_remaining`,
    requests_reset_s`, and the same for `tokens`), where it does.

    `text` and `value` are as they came, because a verdict has to be read from what the judge said, even where one of
    the source's secrets is a word of it. `clean` strikes these secrets out of whatever is shown or kept of a reply;
    None: there are none.
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

    def cleaned(self, text: str) -> str:
        """A text of this reply as it may be shown."""
        return text if self.clean is None else self.clean(text)


class Source(Protocol):
    """An endpoint or a local function that answers requests. One that a configuration opens inherits `SourceKind`,
    which has all of these members.

    Optional members:

    - `local: bool`: true for a function in this machine's processes or threads. If a call hangs, its sample is to
      blame, and the source does not count as silent.
    - `question(request) -> object | None`: who is asked and all that `send` would send, with the nonce cut out
      (`apart`), for the journal's key. None: the answer must not be used again; neither is that to a value that the
      journal cannot encode. Without this method, the journal assumes that everything in the request is sent.
    - `demand(request) -> Demand | None`: the most tokens that the body of the request may take (`Demanding`).
    """

    @property
    def name(self) -> str: ...

    @property
    def model(self) -> str:
        """What answers, for people and metrics: the model, the function's path, or the address of a service."""
        ...

    @property
    def slots(self) -> int | None:
        """How many requests it can work on at once in this process; None: as many as its limits allow."""
        ...

    async def send(self, request: Request, *, on_sent: Callable[[], None]) -> Reply:
        """Ask once, and return the reply or raise exactly one error: a `SourceError`, or `InvalidReply` where there
        is an answer that can be no verdict: the model or a content filter refused, or a service's value is not JSON.

        `on_sent` is called when the request is written to the wire, which is what a server's limits count; a source
        without a wire calls it before it starts. There is no time limit in here but the one for connecting: the
        scheduler bounds the attempt by cancelling it, and a cancelled call frees its connection, process or thread
        slot before it returns.
        """
        ...

    async def aclose(self) -> None:
        """Close connections and workers. Idempotent."""
        ...


def apart(text: str, nonce: str) -> tuple[str, ...]:
    """Cut `text` at every occurrence of `nonce`, so that what is left does not depend on the draw; without a nonce it
    is whole.
    """
    return tuple(text.split(nonce)) if nonce else (text,)
