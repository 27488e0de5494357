"""Judges made from keywords, and the sample that most tests ask them about."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from qreward_plugins.config.models import FunctionJudge as FunctionJudgeConfig
from qreward_plugins.config.models import LLMJudge as LLMJudgeConfig
from qreward_plugins.judges import FunctionJudge, LLMJudge, build_judge
from qreward_plugins.samples import Sample

KEY = b"a key that no policy can see"


@pytest.fixture(scope="session")
def llm() -> Callable[..., LLMJudge]:
    def build(*, key: bytes = KEY, **keys: Any) -> LLMJudge:
        config = LLMJudgeConfig(kind="llm", **keys)
        judge = build_judge("quality", config, sources=("fast", "slow"), key=key)
        assert isinstance(judge, LLMJudge)
        return judge

    return build


@pytest.fixture(scope="session")
def function() -> Callable[..., FunctionJudge]:
    def build(**keys: Any) -> FunctionJudge:
        config = FunctionJudgeConfig(kind="function", **keys)
        judge = build_judge("rules", config, sources=("local",), key=KEY)
        assert isinstance(judge, FunctionJudge)
        return judge

    return build


@pytest.fixture(scope="session")
def sample() -> Sample:
    return Sample(
        [{"role": "user", "content": "What is 2 + 2?"}], "It is 4.", ground_truth="4", data_source="math", extras={}
    )
