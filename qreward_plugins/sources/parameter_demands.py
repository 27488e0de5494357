"""Computes what the parameters of a body add to the tokens of a request.

The requests of a judge have the same parameters, so results are kept by the encoded body.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from ..quotas.demand import Texture
from ..samples.images import EncodedImage
from ..samples.json_values import encoded

_LONGEST_KEPT_BYTES = 8192
_MOST_KEPT = 64
_IMMUTABLE = (str, int, float, bool, type(None))


class ParameterDemands:
    """The demands of the parameters of one source. `completion_bound` returns the most completion tokens that a body
    allows; None if it sets no bound.
    """

    def __init__(self, completion_bound: Callable[[Mapping[str, Any]], int | None]) -> None:
        self._completion_bound = completion_bound
        self._kept: dict[bytes, tuple[Texture, int | None]] = {}
        self._last: Mapping[str, Any] = {}
        self._of_last: tuple[Texture, int | None] | None = None

    def of(self, body: Mapping[str, Any]) -> tuple[Texture, int | None]:
        """Return the texture of a body without its prompt, and its bound on a completion."""
        if self._of_last is not None and _same(body, self._last):
            return self._of_last
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
        if len(sent) <= _LONGEST_KEPT_BYTES:
            self._last, self._of_last = dict(body), found
        return found


def _same(body: Mapping[str, Any], other: Mapping[str, Any]) -> bool:
    """Whether two bodies have the very same values, which cannot change. Equality would take True for 1."""
    return len(body) == len(other) and all(
        type(value) in _IMMUTABLE and other.get(key, body) is value for key, value in body.items()
    )
