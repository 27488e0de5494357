"""Judges turn samples into verdicts: they ask sources and read the answers."""

from ..config.models import AskingConfig as AskingConfig
from ..config.models import Interval as Interval
from ..config.models import JudgeConfig as JudgeConfig
from ..config.nodes import JudgeName as JudgeName
from ..scheduling.calls import Answer as Answer
from ..scheduling.calls import Call as Call
from ..scheduling.calls import CallFailed as CallFailed
from .base import Ask as Ask
from .base import GroupJudge as GroupJudge
from .base import Judge as Judge
from .base import JudgeFailed as JudgeFailed
from .base import Opening as Opening
from .code import CodeJudge as CodeJudge
from .function import FunctionJudge as FunctionJudge
from .leaf import Leaf as Leaf
from .leaf import text_call as text_call
from .llm import LLMJudge as LLMJudge
from .reward_model import RewardModelJudge as RewardModelJudge
from .router import JudgeRouter as JudgeRouter
from .router import compares_siblings as compares_siblings
from .router import kind_of as kind_of
from .router import refuse_comparing as refuse_comparing
from .router import refuse_parts as refuse_parts
from .router import tells_steps as tells_steps
