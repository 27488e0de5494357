"""The one client of a reward server.

- `client`: `RewardClient` and `BlockingRewardClient`. `reward_functions`: the functions that trainers call.
- `facts`, `reward_server`: what a server says of itself. `rows`: samples and outcomes as JSON.
- `link`, `backlog`: the connection of an engine to a server, and the samples that wait for room.
"""

from __future__ import annotations

from .client import REPLY_WITHIN_S, SAMPLES_A_REQUEST, BlockingRewardClient, RewardClient

__all__ = ["REPLY_WITHIN_S", "SAMPLES_A_REQUEST", "BlockingRewardClient", "RewardClient"]
