"""The reward server: `POST /score`, and the forms of programs that ask for rewards over HTTP already."""

from __future__ import annotations

from .server import RewardServer

__all__ = ["RewardServer"]
