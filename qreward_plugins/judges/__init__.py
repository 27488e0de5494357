"""Judges: what a sample is asked, and what the reply is worth. Pure functions, no I/O."""

from __future__ import annotations

from .base import Judge
from .function import FunctionJudge
from .llm import LLMJudge
from .panel import InCharge, Panel, build_judge, parts_of
from .sums import JudgeSum

__all__ = ["FunctionJudge", "InCharge", "Judge", "JudgeSum", "LLMJudge", "Panel", "build_judge", "parts_of"]
