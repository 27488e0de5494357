"""Virtual time: the production code, run by a clock that jumps, over sources that keep strict books."""

from .clock import Deadlock, VirtualTimeLoop, run
from .sources import Behaviour, SimulatedSource

__all__ = ["Behaviour", "Deadlock", "SimulatedSource", "VirtualTimeLoop", "run"]
