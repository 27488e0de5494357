"""A reward model of verl that shares the GPUs with the rollout, and that nobody asks.

verl imports this in each of its processes (`VERL_USE_EXTERNAL_MODULES`). Judges that need no reward model are served as
usual beside it; what verl passes to them differs.
"""

from __future__ import annotations

from verl.workers.rollout.replica import RolloutReplica, RolloutReplicaRegistry


class Idle(RolloutReplica):
    """Its server stands nowhere, because no judge of these trainings asks it."""

    async def init_colocated(self, resource_pool):
        await self.launch_servers()

    async def launch_servers(self):
        self._server_address = "127.0.0.1:9"

    async def sleep(self):
        pass

    async def wake_up(self):
        pass


RolloutReplicaRegistry.register("idle", lambda: Idle)


def score(data_source, solution_str, ground_truth, extra_info=None):
    """1 for the reference answer, else 0."""
    return float(ground_truth in solution_str)
