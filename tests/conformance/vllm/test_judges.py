"""Chat judges at real servers: what vLLM answers in each dialect, and a whole verdict of a model behind llama.cpp."""

from __future__ import annotations

from typing import Any

import pytest

from qreward_plugins import RewardEngine, Sample, Scored
from qreward_plugins.sources import Reply

pytestmark = pytest.mark.anyio
QUESTION = Sample([{"role": "user", "content": "17 + 25?"}], "It is 42.", ground_truth="42")
# A verdict that cannot ramble: small models copy the form of the prompt into a free rationale.
VERDICT = {
    "type": "json_schema",
    "json_schema": {
        "name": "verdict",
        "strict": True,
        "schema": {
            "type": "object",
            "properties": {
                "id": {"type": "string", "pattern": "^[0-9a-f]{12}$"},
                "rationale": {"type": "string", "enum": ["It is right.", "It is wrong."]},
                "score": {"type": "integer", "minimum": 0, "maximum": 10},
            },
            "required": ["id", "rationale", "score"],
            "additionalProperties": False,
        },
    },
}


def configured(url: str, model: str, **source: Any) -> dict[str, Any]:
    node = {"kind": "openai", "base_url": url, "model": model, "timeouts": {"total_s": 300}, **source}
    judge = {"kind": "llm", "max_tokens": 64, "invalid_retries": 1, "instructions": "Is the response right?"}
    return {"sources": {"judge": node}, "judges": {"quality": judge}, "engine": {"deadline_s": 600, "seed": 1}}


@pytest.mark.parametrize(
    "source",
    [{"dialect": "openai"}, {"dialect": "openai", "stream": True}, {"dialect": "responses"}, {"dialect": "anthropic"}],
)
async def test_vllm_answers_each_dialect(served, source):
    """The weights are random, so the text is no verdict; request and reply are understood on both sides."""
    config = configured(f"{served('chat')}/v1", "chat", **source)
    async with RewardEngine(config) as engine:
        judge = engine.judges["quality"]
        reply: Reply = await engine.upstreams["judge"].source.send(
            judge.request(QUESTION, attempt=0), on_sent=lambda: None
        )
    assert reply.model == "chat"
    assert reply.text
    assert reply.usage is not None
    assert reply.usage.prompt_tokens > 100
    assert 0 < reply.usage.completion_tokens <= 64


async def test_llama_cpp_answers_as_a_judge(served):
    parameters = {"temperature": 0, "response_format": VERDICT}
    limits = {"concurrency": 1}
    async with RewardEngine(
        configured(f"{served('llama')}/v1", "llama", parameters=parameters, limits=limits)
    ) as engine:
        outcome = await engine.score(QUESTION)
    assert isinstance(outcome, Scored), outcome
    assert 0 <= outcome.verdict.score <= 1
    assert outcome.verdict.rationale in ("It is right.", "It is wrong.")
    assert outcome.verdict.model == "llama"
    assert outcome.verdict.usage.completion_tokens > 0
