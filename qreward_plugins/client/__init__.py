"""The one client of a reward server.

- `client`: `RewardClient`. `rows`: samples, outcomes and facts as JSON.

    async with RewardClient("http://127.0.0.1:8080") as client:
        outcomes = await client.score_all(samples, deadline_s=60)
"""

from __future__ import annotations

from .client import RewardClient

__all__ = ["RewardClient"]
