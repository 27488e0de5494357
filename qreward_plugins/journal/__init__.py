"""The journal: a durable record of outcomes. It serves as cache, for resuming after a crash, and to look at a run.

Writing: `journal` is what the engine calls, `entries` makes rows of outcomes, `texts` decides whose texts are kept,
`writer` has the thread, `database` the file, `keys` says when an answer is used again, and `training` has what the
trainer made of samples. Reading: `stories` has all about a sample, `samples` those to judge again, `comparison` two
judges, and `audit` looks for what a policy does to a judge.
"""

from __future__ import annotations

from .database import check_place
from .journal import Journal
from .keys import question_keys
from .training import Trained, TrainingLog

__all__ = ["Journal", "Trained", "TrainingLog", "check_place", "question_keys"]
