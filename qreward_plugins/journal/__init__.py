"""The journal: a durable record of outcomes. It serves as cache, for resuming after a crash, and as audit trail."""

from __future__ import annotations

from .database import check_place
from .journal import Journal
from .keys import question_keys
from .training import Trained, TrainingLog

__all__ = ["Journal", "Trained", "TrainingLog", "check_place", "question_keys"]
