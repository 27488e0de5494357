"""Virtual time: the production code, run by a clock that jumps, over servers that keep strict books.

Two kinds of sources: `SimulatedServer` plays a `Server` with hidden work, luck and faults, which is what scenarios are
made of; `SimulatedSource` does what a test tells it, request by request.
"""

from .answers import score_of
from .bound import Job, makespan_bound_s
from .chance import random_faults, random_servers
from .clock import Deadlock, VirtualTimeLoop, run
from .draws import Draw, Luck
from .scenarios import SCENARIOS, Scenario, scenario
from .servers import Fault, Server
from .simulated_server import Served, SimulatedServer
from .sources import Behaviour, SimulatedSource
from .trace import Trace

__all__ = [
    "SCENARIOS",
    "Behaviour",
    "Deadlock",
    "Draw",
    "Fault",
    "Job",
    "Luck",
    "Scenario",
    "Served",
    "Server",
    "SimulatedServer",
    "SimulatedSource",
    "Trace",
    "VirtualTimeLoop",
    "makespan_bound_s",
    "random_faults",
    "random_servers",
    "run",
    "scenario",
    "score_of",
]
