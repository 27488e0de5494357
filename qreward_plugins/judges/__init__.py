"""Judges turn samples into verdicts: they ask sources and read the answers."""

from __future__ import annotations

from ..config.judge_models import AskingConfig, Interval, JudgeConfig
from ..config.nodes import JudgeName
from ..scheduling.calls import Answer, Call, CallFailed
from .base import Ask, GroupJudge, Judge, JudgeFailed, Opening
from .code import CodeJudge
from .function import FunctionJudge
from .leaf import Leaf
from .llm import LLMJudge
from .reward_model import RewardModelJudge
from .router import JudgeRouter, compares_siblings, kind_of, refuse_comparing, refuse_parts, tells_steps
from .text_calls import text_call

__all__ = [
    "Answer",
    "Ask",
    "AskingConfig",
    "Call",
    "CallFailed",
    "CodeJudge",
    "FunctionJudge",
    "GroupJudge",
    "Interval",
    "Judge",
    "JudgeConfig",
    "JudgeFailed",
    "JudgeName",
    "JudgeRouter",
    "LLMJudge",
    "Leaf",
    "Opening",
    "RewardModelJudge",
    "compares_siblings",
    "kind_of",
    "refuse_comparing",
    "refuse_parts",
    "tells_steps",
    "text_call",
]
