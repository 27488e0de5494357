"""Runs the production code in virtual time, over simulated servers with strict limits.

There are two kinds of sources. `SimulatedServer` plays a `Server` with hidden work, random latency and faults, for
scenarios. `SimulatedSource` does what a test says, request by request.
"""

from .bound import Job, makespan_bound_s
from .clock import Deadlock, VirtualTimeLoop, run
from .draws import Luck, score_of
from .scenarios import FAULTS, SCENARIOS, Scenario, scenario
from .servers import Fault, Server
from .simulated_server import SimulatedServer
from .sources import SimulatedSource
from .trial_player import quiet

__all__ = [
    "FAULTS",
    "SCENARIOS",
    "Deadlock",
    "Fault",
    "Job",
    "Luck",
    "Scenario",
    "Server",
    "SimulatedServer",
    "SimulatedSource",
    "VirtualTimeLoop",
    "makespan_bound_s",
    "quiet",
    "run",
    "scenario",
    "score_of",
]
