"""The journal: a durable record of outcomes. It serves as cache, for resuming after a crash, and as audit trail."""

from __future__ import annotations

from .journal import Journal
from .keys import question_keys

__all__ = ["Journal", "question_keys"]
