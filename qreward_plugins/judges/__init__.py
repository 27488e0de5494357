"""Judges turn samples into verdicts: they ask sources and read the answers."""

from __future__ import annotations

from ..config.judge_models import AskingConfig, Interval, JudgeConfig
from ..config.nodes import JudgeName, SourceName
from ..scheduling.calls import Answer, Call, CallFailed
from .base import Ask, GroupJudge, Judge, JudgeFailed, Opening, together
from .cascades import CascadeJudge
from .code import CodeJudge
from .function import FunctionJudge
from .gates import GateJudge
from .leaf import Leaf
from .llm import LLMJudge
from .panels import PanelJudge
from .ranks import RankJudge
from .reward_model import RewardModelJudge
from .router import JudgeRouter, compares_siblings, kind_of, open_judge, refuse_comparing, refuse_parts, tells_steps
from .screens import ScreenJudge
from .similarity import SimilarityJudge
from .sums import SumJudge
from .text_calls import text_call
from .turns import TurnsJudge

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
    "PanelJudge",
    "RankJudge",
    "RewardModelJudge",
    "ScreenJudge",
    "SimilarityJudge",
    "SourceName",
    "SumJudge",
    "TurnsJudge",
    "compares_siblings",
    "kind_of",
    "open_judge",
    "refuse_comparing",
    "refuse_parts",
    "tells_steps",
    "text_call",
    "together",
]
