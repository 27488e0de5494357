"""A client's own request that a source sends on, and the reply that goes back to the client as it came.

The body is parsed once, and written again with another model. JSON's numbers and texts survive that exactly: integers
of any size, and lone surrogates.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from ..errors import InputError
from ..quotas.demand import TOKENS_PER_ATTACHMENT, Texture, overhead_of

FORWARDED_HEADERS = ("anthropic-beta", "anthropic-version", "openai-beta")
"""Headers of a client that are sent on. They say how the body is to be read; no other header leaves."""
RETURNED_HEADERS = (
    "content-type",
    "request-id",
    "x-request-id",
    "openai-processing-ms",
    "openai-version",
    "retry-after",
    "retry-after-ms",
)
"""Headers of a source that its caller gets. The rate limits of a source are not among them: many callers share them."""
_DATA = frozenset({"data", "file_data", "b64_json"})
"""Keys of attachments in base64."""
_DATA_URLS = frozenset({"file_data", "file_url", "image", "image_url", "uri", "url", "video_url"})
"""Keys of attachments in a data URL. Under other keys, such as `text`, it is a text that a model reads."""
_DATA_URL = re.compile(r"data:[\w.+-]+/[\w.+-]+(?:;[\w.+=-]+)*;base64,")
_BASE64 = re.compile(r"[A-Za-z0-9+/_\r\n-]+={0,2}\s*")
_NO_DATA = 256
"""A text up to this length is no attachment, whatever its key is."""


@dataclass(frozen=True, slots=True)
class RawReply:
    """The reply of a source, for a client. `headers` are those of `RETURNED_HEADERS`, names in lower case. No secret of
    the source is in it. `body` is empty for the head of a stream.
    """

    status: int
    headers: Mapping[str, str] = field(repr=False)
    body: bytes = field(default=b"", repr=False)


class Receiver:
    """Who gets the reply to a client's own request, beside the pieces of a stream. By default nobody does."""

    def begin(self, head: RawReply) -> None:
        """Take in the head of a stream, before its first piece."""

    def refused(self, reply: RawReply) -> None:
        """Take in the reply of a source that refuses the request."""

    def has_room(self) -> bool:
        """Whether more may come. False: the client reads slowly, and the source goes on after `wait_for_room`."""
        return True

    async def wait_for_room(self) -> None:
        """Wait until the client has read enough."""


@dataclass(frozen=True, slots=True)
class PassedRequest:
    """A client's own request.

    `body` is JSON, and `headers` are those of `FORWARDED_HEADERS`. `stream`: the client asked for server-sent events.
    """

    body: Mapping[str, Any] = field(repr=False)
    headers: Mapping[str, str] = field(default_factory=dict, repr=False)
    stream: bool = False
    alone: bool = False
    """Whether no other source can be asked. A 403 or 404 is then the reply to the client, which may have named what the
    provider does not keep."""
    receiver: Receiver = field(default_factory=Receiver, repr=False)

    texture: Texture = field(init=False, repr=False, compare=False)
    """What its texts consist of. All texts count, because tools, calls and documents get into the prompt, too."""
    overhead: int = field(init=False, repr=False, compare=False)
    """Assumed tokens of the chat template and of attachments."""

    def __post_init__(self) -> None:
        texts, attachments = _texts_in(self.body)
        object.__setattr__(self, "texture", Texture.of(texts))
        messages = max((len(item) for item in self.body.values() if isinstance(item, list)), default=1)
        overhead = overhead_of(max(1, messages)) + TOKENS_PER_ATTACHMENT * attachments
        object.__setattr__(self, "overhead", overhead)

    def written(self, model: str | None) -> bytes:
        """Return the body as bytes, with `model` in place of its own; None: the model is not in the body."""
        body = dict(self.body)
        if model is not None:
            # The place of a key does not change.
            body["model"] = model
        return json.dumps(body, allow_nan=False, separators=(",", ":")).encode()


def _texts_in(body: Mapping[str, Any]) -> tuple[list[str], int]:
    """Return all texts and keys in a body, and the number of attachments (images, audio, files)."""
    texts: list[str] = []
    attachments = 0
    pending: list[Any] = [value for key, value in body.items() if key != "model"]
    while pending:
        item = pending.pop()
        if isinstance(item, str):
            texts.append(item)
        elif isinstance(item, list):
            pending += item
        elif isinstance(item, dict):
            for key, value in item.items():
                if isinstance(value, str) and _is_attachment(key, value):
                    attachments += 1
                else:
                    texts.append(key)
                    pending.append(value)
    return texts, attachments


def _is_attachment(key: str, value: str) -> bool:
    """Whether a text is an attachment. Any other text counts as one, or a long prompt would exceed the token limits."""
    if key in _DATA_URLS and _DATA_URL.match(value):
        return True
    return key in _DATA and len(value) > _NO_DATA and _BASE64.fullmatch(value) is not None


def forwarded_headers(headers: Mapping[str, str]) -> dict[str, str]:
    """Return the headers of a client that are sent on, in lower case. One that comes several times is joined.

    Raises `InputError` for a value that cannot be sent: it would look like a fault of the source.
    """
    found: dict[str, str] = {}
    for key, value in headers.items():
        name = key.lower()
        if name not in FORWARDED_HEADERS:
            continue
        if not can_be_sent(value):
            raise InputError(f"the header {name} must be printable ASCII")
        found[name] = f"{found[name]}, {value}" if name in found else value
    return found


def can_be_sent(value: str) -> bool:
    """Whether a header can carry this value."""
    return value.isascii() and value.isprintable()


def parsed_body(data: bytes) -> dict[str, Any]:
    """Parse the body of a client's request. Raises `InputError` for anything but a JSON object."""
    try:
        body = json.loads(data, parse_constant=_refuse, parse_float=_finite)
    except (ValueError, RecursionError) as error:
        where = f" at character {error.pos:,}" if isinstance(error, json.JSONDecodeError) else ""
        problem = f"the body is not JSON: {type(error).__name__}{where}"
    else:
        if isinstance(body, dict):
            return body
        problem = "the body must be a JSON object"
    raise InputError(problem)


def loads_leniently(data: bytes) -> dict[str, Any] | None:
    """Parse a reply as clients do: with lone surrogates and NaN, which strict parsers refuse. None: it is no object."""
    try:
        found = json.loads(data)
    except (ValueError, RecursionError):
        return None
    return found if isinstance(found, dict) else None


def _refuse(constant: str) -> float:
    raise ValueError(constant)


def _finite(text: str) -> float:
    number = float(text)
    if number in (float("inf"), float("-inf")):
        raise ValueError(text)
    return number


def returned_headers(headers: Mapping[str, str], clean: Callable[[str], str] | None) -> dict[str, str]:
    """Return the headers of a reply that its client gets. One that is not ASCII is left out: httpx cannot hold it."""
    found: dict[str, str] = {}
    for name in RETURNED_HEADERS:
        value = headers.get(name)
        if value is not None and can_be_sent(value):
            found[name] = value if clean is None else clean(value)
    return found


def cleaned(body: bytes, clean: Callable[[str], str] | None) -> bytes:
    """Return a body with the source's secrets redacted. Without a secret in it, not one byte changes."""
    if clean is None:
        return body
    text = body.decode("utf-8", "surrogateescape")
    return clean(text).encode("utf-8", "surrogateescape")
