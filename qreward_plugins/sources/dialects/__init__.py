"""The wire formats of chat servers: one module and one class each.

A new dialect is a class that inherits `Dialect`, and an entry in `DIALECTS`.
"""

from __future__ import annotations

from collections.abc import Mapping

from .base import Dialect, Refusal
from .chat import Completions, ReasoningCompletions
from .gemini import Gemini
from .messages import Messages
from .responses import Responses

DIALECTS: Mapping[str, Dialect] = {
    dialect.name: dialect for dialect in (Completions(), ReasoningCompletions(), Responses(), Messages(), Gemini())
}
"""The dialects by their names in the configuration."""

__all__ = ["DIALECTS", "Dialect", "Refusal"]
