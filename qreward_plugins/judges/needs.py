"""Finds what a judge asks for and a source cannot send."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from ..config import configured_name
from ..errors import Mistake

if TYPE_CHECKING:
    from .leaf import Leaf


def unmet_needs(judge: Leaf, sources: Mapping[str, Any]) -> list[Mistake]:
    """Return a mistake for every parameter of `judge` that one of these opened sources would leave out.

    A source without the method `unmet` can send everything.
    """
    found: dict[Mistake, None] = {}
    for name, source in sources.items():
        unmet = getattr(source, "unmet", None)
        if not callable(unmet) or not judge.parameters:
            continue
        for refusal in unmet(judge.parameters, thinking_tokens=judge.thinking_tokens):
            problem = f"source {configured_name(name)!r}: {refusal.problem}"
            remedy = refusal.remedy or "Leave it out, or name other sources for this judge."
            found.setdefault(Mistake(f"judges.{judge.name}.{refusal.key}", problem, remedy))
    return list(found)
