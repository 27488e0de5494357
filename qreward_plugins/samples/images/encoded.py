"""Defines `EncodedImage`, an image in the body of a request."""

from __future__ import annotations

import base64
import copy
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

from ...errors import InputError
from .pillow import MEDIA_TYPES

if TYPE_CHECKING:
    from .image import Image

Form: TypeAlias = Literal["data_url", "base64"]

_DEEPEST_IMAGE = 8
"""Most levels of a body above an image."""


class EncodedImage:
    """An image in the body of a request. Its text is made when the body is written, and is not kept.

    The neutral form of an image in `Request.messages` is a part `{"type": "image_url", "image_url": {"url": encoded}}`
    with an `EncodedImage`. A dialect with another form of parts takes `media_type` and `as_base64()` from it. `str()`
    gives the text that is sent, a data URL or base64; it decodes the image, so call it in a thread.

    `name` says in messages which image it is ("image 2 of the prompt"). The constructor reads the header and raises
    `InputError` for an image that is broken, animated or has too many pixels. `max_bytes` bounds the encoded image
    before base64; `max_side` is in pixels, and a larger image is scaled down.
    """

    __slots__ = ("_form", "_header", "_image", "_max_bytes", "_max_side", "_name")

    def __init__(self, image: Image, *, name: str = "image", max_side: int, max_bytes: int) -> None:
        self._image, self._name = image, name
        self._max_side, self._max_bytes = max_side, max_bytes
        self._form: Form = "data_url"
        with named(name):
            self._header = image.header
            self._header.check()

    def as_base64(self) -> EncodedImage:
        """The same image, written as base64 without the prefix of a data URL."""
        other = copy.copy(self)
        other._form = "base64"
        return other

    @property
    def media_type(self) -> str:
        """The media type that is sent: image/png, image/jpeg or image/webp."""
        return MEDIA_TYPES[self._header.sent_as(self._max_side, self._max_bytes)[0]]

    @property
    def tokens(self) -> int:
        """Assumed tokens of the image as it is sent."""
        return self._header.within(self._max_side).tokens

    @property
    def identity(self) -> str:
        """A text that identifies what is sent, for the journal's key: a hash instead of the encoding.

        Raises `InputError` if a file cannot be read.
        """
        with named(self._name):
            sent = self._header.within(self._max_side)
            return f"{self._form} {self.media_type} {self._image.digest} {sent.width}x{sent.height}"

    def __str__(self) -> str:
        """Raises `InputError` for an image that cannot be decoded, or is larger than `max_bytes`."""
        with named(self._name):
            data = self._image.prepared(self._max_side, self._max_bytes)
            if len(data) > self._max_bytes:
                raise InputError(
                    f"has {len(data):,} bytes as {self.media_type}, and {self._max_bytes:,} are allowed; raise "
                    "max_bytes or lower max_side"
                )
        text = base64.b64encode(data).decode()
        return text if self._form == "base64" else f"data:{self.media_type};base64,{text}"


@contextmanager
def named(name: str) -> Iterator[None]:
    """Put `name` before the message of an `InputError`."""
    try:
        yield
    except InputError as error:
        raise InputError(f"{name} {error}") from None


def images_in(value: Any, depth: int = 0) -> Iterator[EncodedImage]:
    """Yield the images in a body or a message."""
    if type(value) is EncodedImage:
        yield value
    elif isinstance(value, (list, tuple, Mapping)) and depth < _DEEPEST_IMAGE:
        for item in value.values() if isinstance(value, Mapping) else value:
            if not isinstance(item, str):
                yield from images_in(item, depth + 1)
