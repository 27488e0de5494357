"""Judge servers of our own: their topology, their launch, their supervision.

A pool is a number of equal servers, the replicas. `Topology` says which devices each gets. `ServerKind` knows the
command line of a server program. `LocalServer` starts one server below a `guard`, which ends all of its processes.
`Pool` starts all replicas together, and starts again those that die. `Changes` updates its weights, and lets it sleep
and wake. One `PoolActor` owns a pool: an actor of the Ray job, or a thread of this process. `PoolUse` is its client.
"""

from __future__ import annotations

from .pool import Pool, ReplicaState
from .server_kinds import SERVER_KINDS, PoolSpec, Topology, TopologyError

__all__ = ["SERVER_KINDS", "Pool", "PoolSpec", "ReplicaState", "Topology", "TopologyError"]
