"""Judges: what a sample is asked, and what the answers are worth."""

from __future__ import annotations

from .base import Ask, Judge, JudgeFailed
from .function import FunctionJudge
from .leaf import Leaf
from .llm import LLMJudge
from .router import JudgeRouter, build_judge
from .sums import SumJudge

__all__ = [
    "Ask",
    "FunctionJudge",
    "Judge",
    "JudgeFailed",
    "JudgeRouter",
    "LLMJudge",
    "Leaf",
    "SumJudge",
    "build_judge",
]
