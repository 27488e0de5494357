"""The engine: it binds deadline, priority, batch, journal and observers to a sample, and has no rule of its own.

- `engine`: `RewardEngine`. `lifetime`: its parts, its event loop, and their end.
- `scoring`, `judging`, `outcomes`: a sample's way to its outcome. `remote`: the same at a reward server.
- `portal`: the engine for code without an event loop. `texts`: texts, whole or in pieces, and embeddings.
- `starts`, `trial`: the first requests. `held_sources`: sources that take no calls, by hand or between reward phases.
- `reloader`, `difference`: another configuration while it runs.
"""

from __future__ import annotations

from .engine import RewardEngine

__all__ = ["RewardEngine"]
