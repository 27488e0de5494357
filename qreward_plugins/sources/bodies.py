"""Writes the bodies of one source's requests as JSON; and joins several calls in one request (`Lists`), whose reply and
usage it divides. What a body demands is read here, too: what its parameters say, and how long a completion it allows.

A value that JSON cannot hold, and an image that cannot be sent, fail the sample and not the source. Images take long to
encode, so a body with images is written in a thread.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, TypeVar

from ..errors import InputError, InvalidReply, QRewardError, SampleRefused
from ..quotas.tokens import Texture
from ..samples.images import EncodedImage
from ..samples.json_values import encoded
from ..samples.spent import Usage
from .base import Reply, Request, Source
from .replies import Answer
from .threads import ThreadSlots

Items = Callable[[Any], list[Any]]


def one(value: Any) -> list[Any]:
    """The value of a key in the body of one call is one item of the list."""
    return [value]


def several(value: Any) -> list[Any]:
    """The value of a key is a list already, in the body of one call, too."""
    return list(value)


@dataclass(frozen=True)
class Lists:
    """How a server takes several calls. `keys`: the keys of the body whose values become lists, each with the function
    that turns the value of one call into items. `parts` returns the results of a reply: the index of each, None if it
    has none, and the result as the reply to one call; it may raise LookupError, TypeError or ValueError.
    """

    keys: Mapping[str, Items]
    parts: Callable[[Any], Sequence[tuple[Any, Any]]]

    def join(self, bodies: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        """Return one body for several calls."""
        joined = {key: [item for body in bodies for item in items(body[key])] for key, items in self.keys.items()}
        return {**bodies[0], **joined}

    def take_apart(self, content: Any, count: int) -> list[Any] | str:
        """Return the results of a reply to `count` calls, in their order; or what is wrong with the reply."""
        try:
            parts = list(self.parts(content))
        except (LookupError, TypeError, ValueError, AttributeError):
            return "no list of results"
        if len(parts) != count:
            return f"{len(parts):,} results for {count} calls"
        # True is 1 in Python.
        by_index = {index: part for index, part in parts if type(index) is int}
        if by_index.keys() != set(range(count)):
            return "results whose indices are not those of the calls"
        return [by_index[index] for index in range(count)]

    def replies(self, answer: Answer, requests: Sequence[Request], source: Source) -> Sequence[Reply | QRewardError]:
        """Return the reply or the error of each of several requests that were sent as one, from its `answer`.

        Raises what `Answer.reply` raises, if it concerns all of them, and InvalidReply if the results cannot be
        matched.
        """
        outcome = self._understood(answer, requests, source)
        if isinstance(outcome, QRewardError):
            # Raised only here, so that no frame of the traceback holds a part of the answer.
            raise answer.noted(outcome)
        return [answer.noted(each) if isinstance(each, QRewardError) else each for each in outcome]

    def _understood(
        self, answer: Answer, requests: Sequence[Request], source: Source
    ) -> Sequence[Reply | QRewardError] | QRewardError:
        content = answer.no_answer() or answer.parsed()
        if isinstance(content, QRewardError):
            return content
        parts = self.take_apart(content, len(requests))
        if isinstance(parts, str):
            problem = f"source {answer.name!r} ({answer.url}) answered several calls with {parts}"
            return InvalidReply(f"{problem}; each is asked again alone")
        replies = [answer.read_content(part) for part in parts]
        usage = answer.usage_in(content)
        if usage is None:
            return replies
        shares = self.divided(usage, requests, source)
        return [
            replace(reply, usage=share) if isinstance(reply, Reply) else reply
            for reply, share in zip(replies, shares, strict=True)
        ]

    @staticmethod
    def divided(usage: Usage, requests: Sequence[Request], source: Source) -> list[Usage]:
        """Divide the usage of a reply among its calls, by the lengths of their prompts. The parts add up to it."""
        weights = [max(1, request.demand(source).prompt) for request in requests]
        total, done, parts = sum(weights), 0, []
        for weight in weights:
            before, done = done, done + weight
            prompt, completion = (
                tokens * done // total - tokens * before // total
                for tokens in (usage.prompt_tokens, usage.completion_tokens)
            )
            parts.append(Usage(prompt, completion))
        return parts


def listed(items: Any) -> list[Any]:
    """Return a list as it is. Raises TypeError for anything else."""
    if not isinstance(items, list):
        raise TypeError
    return items


def numbered(items: Any, part: Callable[[Any], Any]) -> list[tuple[Any, Any]]:
    """The results of a server that states the index of each. Raises TypeError if `items` is no list of objects."""
    return [(item.get("index"), part(item)) for item in listed(items)]


def in_order(items: Any, part: Callable[[Any], Any]) -> list[tuple[Any, Any]]:
    """The results of a server that keeps the order and states no index."""
    return [(position, part(item)) for position, item in enumerate(listed(items))]


T = TypeVar("T")

_LONGEST_KEPT_BYTES = 8192
_MOST_KEPT = 64


class ParameterDemands:
    """The demands of the parameters of one source. `completion_bound` returns the most completion tokens that a body
    allows; None if it sets no bound.
    """

    def __init__(self, completion_bound: Callable[[Mapping[str, Any]], int | None]) -> None:
        self._completion_bound = completion_bound
        self._kept: dict[bytes, tuple[Texture, int | None]] = {}

    def of(self, body: Mapping[str, Any]) -> tuple[Texture, int | None]:
        """Return the texture of a body without its prompt, and its bound on a completion."""
        sent = encoded(body, image=lambda image: str(image.tokens))
        found = self._kept.get(sent)
        if found is None:
            # Some servers put schemas, tools and documents into the prompt, and scoring services get texts under any
            # key.
            rest = {key: value for key, value in body.items() if not isinstance(value, (int, float)) and key != "model"}
            images: list[int] = []

            def counted(image: EncodedImage) -> str:
                images.append(image.tokens)
                return ""

            texts = [encoded(rest, image=counted)] if rest else []
            found = Texture.of(texts, images=sum(images)), self._completion_bound(body)
            if len(sent) <= _LONGEST_KEPT_BYTES:
                if len(self._kept) >= _MOST_KEPT:
                    self._kept.clear()
                self._kept[sent] = found
        return found


_BOUNDS = frozenset({"maxtokens", "maxcompletiontokens", "maxnewtokens", "maxoutputtokens", "numpredict", "npredict"})
_BUDGETS = frozenset({"budgettokens", "thinkingbudget", "thinkingtokenbudget", "reasoningbudget", "maxthinkingtokens"})
_COUNTS = frozenset({"n", "bestof", "numreturnsequences", "candidatecount", "numbeams", "beamwidth"})
_REASONING = ("reasoning", "thinking", "thinkingconfig")
_OPAQUE = frozenset(
    {
        "messages",
        "responseformat",
        "tools",
        "functions",
        "metadata",
        "logitbias",
        "guidedjson",
        "structuredoutputs",
        "format",
        "responseschema",
        "responsejsonschema",
        "labels",
    }
)
"""Keys whose values hold the user's texts and names, and no sampling parameters."""


def completion_bound(parameters: Mapping[str, Any], *, holds_budget: bool = False) -> int | None:
    """Return the most completion tokens that the parameters of a body allow; None if they set no bound.

    That is `max_tokens` (or a synonym) plus the reasoning budget, times the number of completions (`n`). They are read
    from the final body, so it does not matter where they were configured. The keys are those of the API references of
    OpenAI (chat completions), vLLM, SGLang, Ollama, OpenRouter, DashScope and Gemini.

    If several synonyms of a bound are set, the largest counts, because each server reads other names. A thinking budget
    is added, because some servers do that, unless the bound holds it (`holds_budget`).
    """
    found = _Found()
    found.look_into(parameters)
    if found.most is None:
        return None
    return max(1, found.choices) * (found.most + (0 if holds_budget else found.budget))


class _Found:
    __slots__ = ("budget", "choices", "most")

    def __init__(self) -> None:
        self.most: int | None = None
        self.budget = 0
        self.choices = 1

    def look_into(self, parameters: Mapping[str, Any], *, above: str = "", depth: int = 0) -> None:
        for key, value in parameters.items():
            name = str(key).lower().replace("_", "").replace("-", "")
            if isinstance(value, Mapping):
                if name not in _OPAQUE and depth < 4:
                    self.look_into(value, above=name, depth=depth + 1)
                continue
            number = _whole(value)
            if number is None:
                continue
            if name in _BUDGETS or (above in _REASONING and name in _BOUNDS):
                self.budget = max(self.budget, number)
            elif name in _BOUNDS:
                self.most = max(self.most or 0, number)
            elif name in _COUNTS:
                self.choices = max(self.choices, number)


def _whole(value: Any) -> int | None:
    """Return a positive number rounded up; None for anything else. Servers accept a number in quotes, so it counts.

    0 and negative numbers are None, because some servers read them as "no bound".
    """
    if isinstance(value, bool):
        return None
    try:
        number = float(value)
    except (TypeError, ValueError, OverflowError):
        return None
    return math.ceil(number) if 0 < number < 1e12 else None


def with_parameters(
    body: Mapping[str, Any], parameters: Mapping[str, Any], containers: Sequence[str] = ()
) -> dict[str, Any]:
    """Return `body` with `parameters`, which override its keys; None removes a key.

    In a mapping whose key is one of `containers`, single settings are overridden and removed in the same way.
    """
    merged = {**body, **parameters}
    for key, value in parameters.items():
        if value is None:
            del merged[key]
        elif key in containers and isinstance(value, Mapping):
            own = body.get(key)
            inner = {**(own if isinstance(own, Mapping) else {}), **value}
            merged[key] = {name: setting for name, setting in inner.items() if setting is not None}
    return merged


_THREADS = 2
"""Threads that decode and encode images. There are few, because each may need 200 MB for an image."""


class BodyWriter:
    """Writes the bodies of the requests of the source `name`.

    `body` returns the body of a request. `parameters` override its keys; of a mapping whose key is one of `containers`
    they override single settings. `redact` removes secrets from a message.
    """

    def __init__(
        self,
        name: str,
        body: Callable[[Request], Mapping[str, Any]],
        parameters: Mapping[str, Any],
        containers: Sequence[str],
        *,
        redact: Callable[[str], str],
    ) -> None:
        self._name = name
        self._body = body
        self._parameters = parameters
        self._containers = containers
        self._redact = redact
        self._threads = ThreadSlots(name, _THREADS)

    def whole(self, request: Request, asks: Mapping[str, Any] | None = None) -> dict[str, Any]:
        """Return the body that is sent. The source's parameters override the judge's; None removes a key. `asks` are
        further keys, whose settings are overridden one by one.
        """
        body = self._body(request)
        if asks is None:
            return with_parameters(body, self._parameters, self._containers)
        return with_parameters({**body, **asks}, self._parameters, (*self._containers, *asks))

    def encode(
        self,
        request: Request,
        *,
        image: Callable[[EncodedImage], str] = str,
        asks: Mapping[str, Any] | None = None,
    ) -> bytes:
        """Return the body as bytes. `image` writes an image, as in `encoded`. Raises `SampleRefused`."""
        try:
            return encoded(self.whole(request, asks), image=image)
        except Exception as error:
            raise self._refused(error) from None

    def text_only(self, request: Request, asks: Mapping[str, Any] | None = None) -> bytes | None:
        """Return the body as bytes, with the keys that ask for a stream; None if it has images. Raises
        `SampleRefused`.
        """
        images: list[EncodedImage] = []

        def left_out(image: EncodedImage) -> str:
            images.append(image)
            return ""

        body = self.encode(request, image=left_out, asks=asks)
        return None if images else body

    async def with_images(self, request: Request, asks: Mapping[str, Any] | None = None) -> bytes:
        """Return a body with images as bytes. They are written in a thread. Raises `SampleRefused`."""
        write = partial(self._tried, lambda: encoded(self.whole(request, asks)))
        written: bytes | SampleRefused = await self._threads.run(write, on_start=lambda: None)
        if isinstance(written, SampleRefused):
            raise written
        return written

    def each(self, requests: Sequence[Request]) -> list[dict[str, Any] | SampleRefused]:
        """Return the body of each request, or its error."""
        return [self._tried(partial(self.whole, request)) for request in requests]

    def join(
        self, bodies: Sequence[Mapping[str, Any]], lists: Lists, *, image: Callable[[EncodedImage], str] = str
    ) -> bytes:
        """Return one body of several calls as bytes, from what `each` returned. Raises `SampleRefused`."""
        try:
            return encoded(lists.join(bodies), image=image)
        except Exception as error:
            raise self._refused(error) from None

    async def aclose(self) -> None:
        """Wait for the threads, for up to one second."""
        await self._threads.aclose()

    def _tried(self, write: Callable[[], T]) -> T | SampleRefused:
        """Return what `write` returns, or the error of a sample whose body cannot be written."""
        try:
            return write()
        except Exception as error:
            return self._refused(error)

    def _refused(self, error: Exception) -> SampleRefused:
        # The message of an error that is not ours may hold secrets.
        ours = isinstance(error, InputError)
        reason = str(error) if ours else f"the body cannot be written: {type(error).__name__}"
        return SampleRefused(f"source {self._name!r}: {self._redact(reason)}")
