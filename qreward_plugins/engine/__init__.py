"""The engine: it binds deadline, priority, batch, journal and observers to a sample, and has no rule of its own.

- `engine`: `RewardEngine`. `lifetime`: its parts, its event loop, and their end.
- `scoring`, `judging`, `outcomes`: a sample's way to its outcome. `remote`: the same at a reward server.
- `portal`, `process_portals`: the engine for code without an event loop. `texts`: texts, whole or in pieces.
- `starts`, `trial`: the first requests. `reward_phases`: judges on a trainer's devices.
- `reloader`, `difference`: another configuration while it runs.
"""

from __future__ import annotations

from .engine import RewardEngine

__all__ = ["RewardEngine"]
