"""Judges turn samples into verdicts: they ask sources and read the answers."""

from __future__ import annotations

from ..config.judge_models import AskingConfig, Interval, JudgeConfig
from ..config.nodes import JudgeName, SourceName
from ..scheduling.calls import Answer, Call, CallFailed
from .base import Ask, Judge, JudgeFailed, Opening, together
from .cascades import CascadeJudge
from .code import CodeJudge
from .function import FunctionJudge
from .gates import GateJudge
from .leaf import Leaf
from .llm import LLMJudge
from .panels import PanelJudge
from .reward_model import RewardModelJudge
from .router import JudgeRouter, kind_of, open_judge
from .screens import ScreenJudge
from .sums import SumJudge

__all__ = [
    "Answer",
    "Ask",
    "AskingConfig",
    "Call",
    "CallFailed",
    "CascadeJudge",
    "CodeJudge",
    "FunctionJudge",
    "GateJudge",
    "Interval",
    "Judge",
    "JudgeConfig",
    "JudgeFailed",
    "JudgeName",
    "JudgeRouter",
    "LLMJudge",
    "Leaf",
    "Opening",
    "PanelJudge",
    "RewardModelJudge",
    "ScreenJudge",
    "SourceName",
    "SumJudge",
    "kind_of",
    "open_judge",
    "together",
]
