"""The wire formats of a judge server: one module and one class each."""

from __future__ import annotations

from collections.abc import Mapping

from .anthropic import Anthropic
from .base import Chat, Events, Protocol
from .gemini import Gemini
from .responses import Responses

PROTOCOLS: Mapping[str, Protocol] = {
    protocol.name: protocol for protocol in (Chat(), Responses(), Anthropic(), Gemini())
}
"""The protocols by name."""

__all__ = ["PROTOCOLS", "Events", "Protocol"]
