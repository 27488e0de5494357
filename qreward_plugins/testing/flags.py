"""Refuses misspelt names of flags, which a trainer would ignore or refuse later."""

from __future__ import annotations

import difflib
from collections.abc import Iterable


def refuse_unknown(given: Iterable[str], known: Iterable[str], what: str, *, note: str = "") -> None:
    """Raise `TypeError` for the first name in `given` that is not `known`, with the nearest known one and `note`."""
    names = list(known)
    for name in given:
        if name not in names:
            near = difflib.get_close_matches(name, names, n=1, cutoff=0.5)
            hint = f"did you mean {near[0]!r}?" if near else f"known are: {', '.join(sorted(names))}"
            raise TypeError(f"{what} has no {name!r}: {hint}{note}")
