"""The journal: the durable record of verdicts, which is the cache, the way back after a crash, and the audit trail."""

from __future__ import annotations

from .journal import Journal
from .keys import question_keys

__all__ = ["Journal", "question_keys"]
