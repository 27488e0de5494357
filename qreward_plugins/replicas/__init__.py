"""Judge servers of our own: their topology, their launch, their supervision.

A pool is a number of equal servers, the replicas. `Topology` says which devices each gets. `ServerKind` knows the
command line of a server program. `guard` is the process that leads the processes of one server and ends all of them.
`Replica` starts one server, waits until it is ready, and starts it again when it dies. `Pool` starts all replicas
together. The processes of a machine share a pool through `pool_process`, those of a Ray job through `ray_pool`.
`Changes` updates its weights, and lets it sleep and wake.
"""

from __future__ import annotations

from .pool import Pool, PoolSpec
from .replica_state import ReplicaState
from .server_kinds import SERVER_KINDS, ServerKind
from .topology import Topology, TopologyError

__all__ = ["SERVER_KINDS", "Pool", "PoolSpec", "ReplicaState", "ServerKind", "Topology", "TopologyError"]
