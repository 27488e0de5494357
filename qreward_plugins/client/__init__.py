"""The one client of a reward server.

- `client`: `RewardClient` and `BlockingRewardClient`. `reward_functions`: the functions that trainers call.
- `connection`: the session, and when the server is asked again. `rows`: samples, outcomes and facts as JSON.

    async with RewardClient("http://127.0.0.1:8080") as client:
        outcomes = await client.score_all(samples, deadline_s=60)
"""

from __future__ import annotations

from .client import BlockingRewardClient, RewardClient

__all__ = ["BlockingRewardClient", "RewardClient"]
