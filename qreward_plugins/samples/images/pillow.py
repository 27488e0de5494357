"""Reads, checks, scales and encodes images with Pillow, an optional dependency that is imported on first use.

Whatever is wrong with an image becomes an `InputError`, so it costs its own sample.
"""

from __future__ import annotations

import io
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from ...errors import InputError, kind_of

EXTRA = "pip install 'qreward-plugins[images]'"

MOST_PIXELS = 50_000_000
"""Most pixels of an image: its pixels then take at most 200 MB. More is taken for a decompression bomb."""
MOST_INPUT_BYTES = 64 * 1024 * 1024
"""Largest image that is read, in bytes, before it is scaled down."""
_SMALL_READS = 20_000
_SMALL_BYTES = 128
"""Most reads of fewer bytes for a header. The event loop waits for it, and Pillow takes 0.6 s for 4 MiB of empty
parts. The pixels of a GIF come in blocks of 255 bytes, each with a read for its length.
"""
TOKENS_PER_IMAGE = 2048
"""Assumed tokens of any image."""
PIXELS_PER_TOKEN = 512
"""An image takes another token for each of these many pixels (Qwen-VL 784, Claude 750, Gemini 2,300, GPT-4o 1,500)."""

_READ_FORMATS = ("PNG", "JPEG", "WEBP", "GIF", "BMP", "TIFF")
"""Pillow also has decoders that run programs (EPS) or are rarely tested; these are never tried."""
_SENT_AS = {"PNG": "PNG", "JPEG": "JPEG", "MPO": "JPEG", "WEBP": "WEBP"}
"""Formats that all judges read. Others are sent as PNG."""
_SENT_MODES = frozenset({"1", "L", "LA", "P", "PA", "RGB", "RGBA", "I;16", "I"})
"""Modes that are sent unchanged. Others (CMYK, YCbCr, LAB) are converted to RGB."""
_MAYBE_TRANSPARENT = frozenset({"LA", "P", "PA", "RGBA"})
MEDIA_TYPES = {"PNG": "image/png", "JPEG": "image/jpeg", "WEBP": "image/webp"}
_JPEG_QUALITY = 92
_ORIENTATION = 0x0112
"""The EXIF tag of the orientation."""

FOREIGN_PIXELS = threading.Lock()
"""Pillow loads the pixels of an image on first use, and two threads must not do that at the same time."""


@dataclass(frozen=True, slots=True)
class Header:
    """What the header of an image says. `format` is "" for pixels. `width` and `height` are in pixels."""

    format: str
    mode: str
    width: int
    height: int
    animated: bool = False

    @property
    def tokens(self) -> int:
        """Assumed tokens, for limits: `TOKENS_PER_IMAGE`, and one for each `PIXELS_PER_TOKEN` pixels."""
        return TOKENS_PER_IMAGE + -(-self.width * self.height // PIXELS_PER_TOKEN)

    def check(self) -> None:
        """Raise `InputError` for an image that no judge should get."""
        if self.width * self.height > MOST_PIXELS:
            raise InputError(f"has {self.width:,} x {self.height:,} pixels; at most {MOST_PIXELS:,} are decoded")
        if self.animated:
            raise InputError("is animated or has several pages, and models see only one; send that one")

    def within(self, max_side: int) -> Header:
        """The header of the image after it is scaled down to `max_side` pixels on its longer side."""
        longer = max(self.width, self.height)
        if longer <= max_side:
            return self
        width, height = (max(1, round(side * max_side / longer)) for side in (self.width, self.height))
        return Header(self.format, self.mode, width, height, self.animated)

    def sent_as(self, max_side: int, max_bytes: int) -> tuple[str, bool]:
        """The format in which the image is sent, and whether it is encoded anew for that.

        A known format is kept. Others become PNG, or JPEG if PNG could be larger than `max_bytes`.
        """
        known = _SENT_AS.get(self.format, "PNG")
        smaller = self.within(max_side)
        anew = smaller is not self or known != self.format or self.mode not in _SENT_MODES
        large = 3 * smaller.width * smaller.height > max_bytes
        if anew and known == "PNG" and large and self.mode not in _MAYBE_TRANSPARENT:
            return "JPEG", True
        return known, anew


def is_picture(value: Any) -> bool:
    """Whether `value` is a Pillow image. Does not import Pillow."""
    module = sys.modules.get("PIL.Image")
    return module is not None and isinstance(value, module.Image)


def has_pillow() -> bool:
    """Whether Pillow can be imported."""
    return find_spec("PIL") is not None


def of_array(array: Any) -> Any:
    """The Pillow image of a numpy array. Raises `InputError`."""
    with explained():
        return _pillow().fromarray(array)


def read_header(source: bytes | Path) -> Header:
    """Read the header of encoded bytes, or of a file. Raises `InputError`."""
    if isinstance(source, Path) and not is_file(source):
        raise InputError("is a path without a file")
    with opened(source, header_only=True) as picture:
        return header_of(picture)


def is_file(path: Path) -> bool:
    """Whether a path leads to a regular file. Raises `InputError` for one that the system refuses."""
    try:
        return path.is_file()
    except (OSError, ValueError):
        raise InputError("is a path that cannot be read") from None


def header_of(picture: Any) -> Header:
    """The header of an opened image. Pixels that were changed after they were read have no format."""
    width, height = picture.size
    # The second image of an MPO is a preview, or the other eye of a stereo camera.
    animated = picture.format != "MPO" and bool(getattr(picture, "is_animated", False))
    return Header(picture.format or "", picture.mode, width, height, animated)


@contextmanager
def opened(source: bytes | Path, *, header_only: bool = False) -> Iterator[Any]:
    """Open encoded bytes with Pillow. Raises `InputError` for everything that goes wrong inside, too."""
    if isinstance(source, bytes) and len(source) > MOST_INPUT_BYTES:
        raise InputError(too_large(len(source)))
    with explained():
        file = io.BytesIO(source) if isinstance(source, bytes) else source.open("rb")
        with file, _pillow().open(_FewReads(file) if header_only else file, formats=_READ_FORMATS) as picture:
            yield picture


class _FewReads:
    """A file that raises `InputError` after `_SMALL_READS` small reads; a large one makes up for others."""

    def __init__(self, file: Any) -> None:
        self._file, self._left = file, float(_SMALL_READS)

    def read(self, size: int = -1) -> Any:
        data = self._file.read(size)
        self._left += len(data) / _SMALL_BYTES - 1
        if self._left < 0:
            raise InputError("has a header of too many small parts; save it again without them")
        return data

    def __getattr__(self, name: str) -> Any:
        return getattr(self._file, name)


@contextmanager
def explained() -> Iterator[None]:
    """Turn all errors of Pillow into `InputError`."""
    pillow = _pillow()
    try:
        yield
    except InputError:
        raise
    except (pillow.DecompressionBombError, pillow.DecompressionBombWarning):
        raise InputError(f"has too many pixels; at most {MOST_PIXELS:,} are decoded") from None
    except pillow.UnidentifiedImageError:
        raise InputError("is no image that can be read (PNG, JPEG, WebP, GIF, BMP, TIFF)") from None
    except Exception as error:
        # Decoders raise anything for broken data: OSError, SyntaxError, ValueError, struct.error, zlib.error.
        raise InputError(f"is broken and cannot be decoded ({kind_of(error)})") from None


def encode(picture: Any, header: Header, max_side: int, max_bytes: int) -> bytes:
    """Encode pixels anew, scaled down to `max_side`."""
    from PIL import ImageOps

    sent_as = header.sent_as(max_side, max_bytes)[0]
    smaller = header.within(max_side)
    with explained():
        # The new file has no EXIF data, which may say that the image is to be turned.
        turned = ImageOps.exif_transpose(picture)
        plain = _plain(turned, opaque=sent_as == "JPEG")
        if smaller is not header:
            size = (smaller.width, smaller.height)
            plain = plain.resize(size if turned.size == picture.size else size[::-1], _pillow().Resampling.LANCZOS)
        target = io.BytesIO()
        plain.save(target, format=sent_as, **({"quality": _JPEG_QUALITY} if sent_as == "JPEG" else {}))
        return target.getvalue()


def turn_of(picture: Any) -> object:
    """How the EXIF data says that the image is to be turned; None if they do not."""
    return picture.getexif().get(_ORIENTATION)


def _plain(picture: Any, *, opaque: bool) -> Any:
    """Convert to a mode that can be scaled and saved."""
    if picture.mode.startswith("I"):
        return picture.point(lambda value: value * (1 / 256)).convert("L")
    if picture.mode in ("L", "RGB") or (picture.mode in ("LA", "RGBA") and not opaque):
        return picture
    transparent = not opaque and (picture.mode == "PA" or "transparency" in picture.info)
    return picture.convert("RGBA" if transparent else "RGB")


def _pillow() -> Any:
    try:
        import PIL.Image
    except ImportError:
        raise InputError(f"cannot be read, because Pillow is not installed: {EXTRA}") from None
    return PIL.Image


def too_large(size: int) -> str:
    """The problem of an image with more than `MOST_INPUT_BYTES`."""
    return f"has {size:,} bytes, and at most {MOST_INPUT_BYTES:,} are read"
