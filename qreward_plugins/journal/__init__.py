"""The journal: a durable record of outcomes. It serves as cache, for resuming after a crash, and to look at a run.

Writing: `journal` is what the engine calls, `entries` makes rows of outcomes, `texts` decides whose texts are kept,
`writer` has the thread, `database` the file, and `keys` says when an answer is used again. Reading: `stories` has all
about a sample, `comparison` two judges, and `audit` looks for what a policy does to a judge. `live_sources` has the
sources of a run that goes on.
"""

from __future__ import annotations

from .database import check_place
from .entries import Trained
from .journal import Journal, TrainingLog
from .keys import question_keys

__all__ = ["Journal", "Trained", "TrainingLog", "check_place", "question_keys"]
