"""Judges made from keywords, and the sample that most tests ask them about."""

from __future__ import annotations

import pytest

from qreward_plugins.config import Config
from qreward_plugins.judges import FunctionJudge, LLMJudge, Opening
from qreward_plugins.samples import Sample

KEY = b"a key that no policy can see"


def opening(*sources, key=KEY):
    return Opening(Config(), sources, key, {}.__getitem__)


@pytest.fixture(scope="session")
def llm():
    def build(*, key=KEY, **keys):
        return LLMJudge("quality", LLMJudge.Config(kind="llm", **keys), opening("fast", "slow", key=key))

    return build


@pytest.fixture(scope="session")
def function():
    def build(**keys):
        return FunctionJudge("rules", FunctionJudge.Config(kind="function", **keys), opening())

    return build


@pytest.fixture(scope="session")
def sample():
    return Sample(
        [{"role": "user", "content": "What is 2 + 2?"}], "It is 4.", ground_truth="4", data_source="math", extras={}
    )
