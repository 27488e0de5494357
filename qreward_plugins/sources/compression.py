"""Decompresses the bodies of replies in pieces of bounded size, for both HTTP clients.

The libraries' own decompression is not used: httpx decompresses whole chunks, so a bomb of 64 KiB takes 64 MB, and
aiohttp takes a gzip body that ends too early for whole. A score that a service sends as a bare number would then be
read short: "0.9" as "0.".
"""

from __future__ import annotations

import zlib
from collections.abc import Iterator

ACCEPTED = "gzip, deflate"
"""The `Accept-Encoding` of requests: what this module decompresses."""
_PIECE_BYTES = 65_536
_GZIP_OR_ZLIB = 47
_RAW = -15
_ZLIB_METHOD = 8
_UNREADABLE = frozenset({"br", "compress", "dcb", "dcz", "zstd"})
"""Compressions that no request asks for. Any other word in the header changes nothing: some servers write `utf-8`."""


class Undecodable(Exception):
    """A body whose compression is broken, cut short or unknown."""


class Decoder:
    """Decompresses one body. `coding` is gzip or deflate."""

    def __init__(self, coding: str) -> None:
        self._coding = coding
        self._zlib = zlib.decompressobj(_GZIP_OR_ZLIB)
        self._begun = False

    def feed(self, chunk: bytes) -> Iterator[bytes]:
        """Yield what `chunk` holds, in pieces of at most 64 KiB. Raises Undecodable."""
        if chunk and not self._begun:
            self._begun = True
            if self._coding == "deflate" and chunk[0] & 0xF != _ZLIB_METHOD:
                # Some servers leave out zlib's header.
                self._zlib = zlib.decompressobj(_RAW)
        while chunk:
            if self._zlib.eof:
                # gzip allows several members, one after the other. Their text is that of all of them.
                if self._coding != "gzip":
                    raise Undecodable
                self._zlib = zlib.decompressobj(_GZIP_OR_ZLIB)
            try:
                piece = self._zlib.decompress(chunk, _PIECE_BYTES)
            except zlib.error:
                raise Undecodable from None
            if piece:
                yield piece
            chunk = self._zlib.unused_data if self._zlib.eof else self._zlib.unconsumed_tail

    def end(self) -> None:
        """Raise Undecodable if the body is not whole. A body without a byte is whole."""
        if self._begun and not self._zlib.eof:
            raise Undecodable


def decoder_of(header: str | None) -> Decoder | None:
    """Return the decoder for a `Content-Encoding`; None if the body is not compressed. Raises Undecodable."""
    if not header:
        return None
    codings = [coding.strip().lower().removeprefix("x-") for coding in header.split(",")]
    if not _UNREADABLE.isdisjoint(codings):
        raise Undecodable
    known = [coding for coding in codings if coding in ("gzip", "deflate")]
    if len(known) > 1:
        raise Undecodable
    return Decoder(known[0]) if known else None
