"""Defines `Image`, an image of a prompt or a response, and finds images in the content of messages."""

from __future__ import annotations

import base64
import binascii
import hashlib
import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

from ...errors import InputError, kind_of
from .pillow import (
    FOREIGN_PIXELS,
    MOST_INPUT_BYTES,
    Header,
    encode,
    explained,
    header_of,
    is_file,
    is_picture,
    of_array,
    opened,
    read_header,
    too_large,
    turn_of,
)

_BARE_BASE64 = ("iVBORw0KGgo", "/9j/", "R0lGOD", "UklGR")
"""How PNG, JPEG, GIF and WebP begin in base64."""
_DATA_URL = re.compile(r"data:(?:image/[a-z0-9.+-]{1,40})?(?:;[a-z0-9=-]{1,40})*;base64,", re.IGNORECASE)
_KEYS = ("bytes", "image", "image_url", "url", "source", "data", "path")
"""Keys under which mappings hold an image, the most certain ones first."""
_MOST_NESTED = 4
_IMAGE_TYPE = re.compile("image", re.IGNORECASE)


class Image:
    """An image: encoded bytes, a data URL, the path of a file, or the pixels of a Pillow image.

    It keeps what it was made of, and encodes that only when it is sent. Two images are equal if they were made of equal
    contents. Make it with `Image.of`.
    """

    __slots__ = ("_digest", "_origin")

    def __init__(self, origin: Any) -> None:
        self._origin = origin
        self._digest = ""

    @classmethod
    def of(cls, value: Any, *, folder: str | Path | None = None) -> Image:
        """Return the image that `value` stands for.

        `value` is an `Image`; bytes; a Pillow image; a numpy array of 8-bit pixels (height, width, channels); a text
        that is a data URL or the base64 of an image; a path or a `file://` URL below `folder` (None: no path is
        allowed); or a mapping that holds one of these, such as a content part of a message (`image`, `image_url`,
        `bytes`, `source`, `path`).

        Raises `InputError` for anything else. It never fetches a URL, and does not check the content.
        """
        if isinstance(value, Image):
            return value
        if isinstance(value, (bytes, bytearray, memoryview)):
            return cls(bytes(value))
        if is_picture(value):
            return cls(value)
        if isinstance(value, Mapping):
            return cls.of(_innermost(value), folder=folder)
        if hasattr(value, "__array_interface__") and hasattr(value, "shape"):
            return cls(of_array(value))
        if isinstance(value, Path):
            return cls(_below(str(value), folder))
        if isinstance(value, str):
            return cls(_text_origin(str.__str__(value), folder))
        if value is None:
            raise InputError("holds no image; give it under `image`, `image_url` or `bytes`")
        raise InputError(f"is of type {kind_of(value)}; give bytes, a Pillow image, a data URL or a path")

    @property
    def digest(self) -> str:
        """A hash of the content, the same in every process: 40 hexadecimal digits. Computed once.

        Raises `InputError` if a file cannot be read.
        """
        if not self._digest:
            self._digest = _digest_of(self._origin)
        return self._digest

    @property
    def data(self) -> bytes:
        """The encoded image. Pixels are encoded as PNG. It is not kept. Raises `InputError`."""
        origin = self._origin
        if isinstance(origin, bytes):
            return origin
        if isinstance(origin, str):
            return _decoded(origin)
        if isinstance(origin, Path):
            return _file_bytes(origin)
        return self.prepared(max(origin.size), MOST_INPUT_BYTES)

    @property
    def header(self) -> Header:
        """Format and size. Reads the header, not the pixels. Raises `InputError` for what is no image."""
        if is_picture(self._origin):
            with FOREIGN_PIXELS, explained():
                return replace(header_of(self._origin), format="")
        return read_header(self._origin if isinstance(self._origin, Path) else self.data)

    def prepared(self, max_side: int, max_bytes: int) -> bytes:
        """Decode the image, and return it as it is sent: unchanged if no side is too long and its format is known.

        Raises `InputError` for an image that cannot be decoded.
        """
        if is_picture(self._origin):
            with FOREIGN_PIXELS, explained():
                pixels = self._origin.copy()
            return encode(pixels, self.header, max_side, max_bytes)
        data = self.data
        with opened(data) as picture:
            header = header_of(picture)
            header.check()
            picture.load()
            anew = header.sent_as(max_side, max_bytes)[1]
            return encode(picture, header, max_side, max_bytes) if anew else data

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Image) and self.digest == other.digest

    def __hash__(self) -> int:
        return hash(self.digest)


def is_image_part(part: Any) -> bool:
    """Whether a content part of a message is an image, by its type, or by its keys if it has none."""
    if not isinstance(part, Mapping) or isinstance(part.get("text"), str):
        return False
    types = [part["type"]] if isinstance(part.get("type"), str) else [key for key in part if isinstance(key, str)]
    return any(_IMAGE_TYPE.search(word) for word in types)


def remote_url(part: Any) -> str | None:
    """The http or https URL of an image part; None if it holds the image itself, or nothing."""
    value = _innermost(part)
    if isinstance(value, str) and value[:8].lower().startswith(("http://", "https://")):
        return str.__str__(value)
    return None


def is_empty_part(part: Any) -> bool:
    """Whether an image part holds no image: a placeholder, for images that are given beside the messages."""
    return is_image_part(part) and _innermost(part) is None


def _innermost(value: Any) -> Any:
    """What a part holds as its image, out of all mappings around it; None if it holds none."""
    for _ in range(_MOST_NESTED):
        if not isinstance(value, Mapping):
            return value
        # Bytes go before anything that was made of them.
        value = next((value[key] for key in _KEYS if value.get(key) is not None), None)
    return None


def _text_origin(text: str, folder: str | Path | None) -> str | Path:
    start = text[:256]
    if start[:5].lower() == "data:":
        if _DATA_URL.match(start) is None:
            raise InputError("is a data URL that is not `data:image/...;base64,`")
        return text
    if len(text) > 64 and start.startswith(_BARE_BASE64):
        return text
    if "://" in start and not start.lower().startswith("file://"):
        raise InputError("is a URL, and images are not fetched; give the image itself, or a data URL")
    return _below(unquote(urlsplit(text).path) if start.lower().startswith("file://") else text, folder)


def _below(path: str, folder: str | Path | None) -> Path:
    if folder is None:
        raise InputError("is a path, and `images.folder` is not configured; set it, or give the image itself")
    try:
        root = Path(folder).expanduser().resolve()
        found = (root / path).resolve()
    except (OSError, ValueError, RuntimeError):
        raise InputError("is a path that cannot be read") from None
    if not found.is_relative_to(root):
        raise InputError("is a path outside of the folder for images")
    return found


def _digest_of(origin: Any) -> str:
    """Hash what an image was made of: encoded bytes, a text, the bytes of a file, or pixels."""
    digest = hashlib.blake2b(digest_size=20)
    if isinstance(origin, Path):
        origin = _file_bytes(origin)
    if isinstance(origin, (bytes, str)):
        digest.update(origin if isinstance(origin, bytes) else origin.encode("utf-8", "surrogatepass"))
        return digest.hexdigest()
    with FOREIGN_PIXELS, explained():
        palette = origin.getpalette() if origin.mode in ("P", "PA") else None
        seen = (origin.mode, tuple(origin.size), palette, origin.info.get("transparency"), turn_of(origin))
        digest.update(repr(seen).encode())
        digest.update(origin.tobytes())
    return digest.hexdigest()


def _decoded(text: str) -> bytes:
    encoded = text[text.find(",") + 1 :] if text[:5].lower() == "data:" else text
    if len(encoded) > 4 * MOST_INPUT_BYTES // 3 + 4:
        raise InputError(too_large(3 * len(encoded) // 4))
    try:
        return base64.b64decode(encoded, validate=True)
    except (binascii.Error, ValueError):
        raise InputError("is a data URL whose base64 is broken") from None


def _file_bytes(path: Path) -> bytes:
    try:
        if not is_file(path):
            raise InputError("is a path without a file")
        with path.open("rb") as file:
            data = file.read(MOST_INPUT_BYTES + 1)
    except OSError as error:
        raise InputError(f"is a file that cannot be read ({error.strerror})") from None
    return data


_PLACEHOLDER = re.compile(r"<image>|<\|vision_start\|>(?:<\|image_pad\|>)+<\|vision_end\|>|<\|image_pad\|>|<\|image\|>")
"""How chat templates write the place of an image (LLaVA and the data sets of verl and slime, Qwen-VL, GLM, Llama)."""


def attach(messages: Sequence[Any], images: Sequence[Any]) -> tuple[list[Any], list[Any]]:
    """Put `images`, which a trainer holds beside the messages, in their places. Return the messages and the rest.

    The places are the image parts of the messages if there are any, else the placeholders in texts (`<image>`,
    `<|vision_start|><|image_pad|><|vision_end|>`). If there are fewer images than parts, only parts without an image
    are filled. The rest are images that came later, with the response. Without any place, all images go before the text
    of the last message of the user.
    """
    left = list(images)
    if not left:
        return list(messages), []
    turns = [dict(message) if isinstance(message, Mapping) else message for message in messages]
    mappings = [turn for turn in turns if isinstance(turn, dict)]
    lists = [turn for turn in mappings if isinstance(turn.get("content"), (list, tuple))]
    parts = [part for turn in lists for part in turn["content"] if is_image_part(part)]
    takes = is_image_part if len(left) >= len(parts) else is_empty_part
    for turn in lists:
        turn["content"] = [
            {"type": "image", "image": left.pop(0)} if left and takes(part) else part for part in turn["content"]
        ]
    if parts:
        return turns, left
    before = len(left)
    for turn in mappings:
        if isinstance(turn.get("content"), str) and turn.get("role") != "system":
            turn["content"] = _filled(turn["content"], left)
    asking = [turn for turn in mappings if turn.get("role") == "user"] or mappings
    if len(left) < before or not asking:
        return turns, left
    content = asking[-1].get("content")
    texts = [{"type": "text", "text": content}] if isinstance(content, str) and content else list(content or ())
    asking[-1]["content"] = [*({"type": "image", "image": image} for image in left), *texts]
    return turns, []


def _filled(text: str, left: list[Any]) -> Any:
    """Replace placeholders in a text by images from `left`; return the parts, or the text if it has no placeholder."""
    parts: list[dict[str, Any]] = []
    done = 0
    for found in _PLACEHOLDER.finditer(text):
        if not left:
            break
        if found.start() > done:
            parts.append({"type": "text", "text": text[done : found.start()]})
        parts.append({"type": "image", "image": left.pop(0)})
        done = found.end()
    if not parts:
        return text
    return [*parts, {"type": "text", "text": text[done:]}] if done < len(text) else parts
