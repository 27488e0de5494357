"""Judges at real servers. Chat judges: what vLLM answers in each dialect, and a whole verdict of a model behind
llama.cpp. Reward models: the scores of vLLM are the logits that transformers computes from the same files.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest

from qreward_plugins import RewardEngine, Sample, Scored
from qreward_plugins.sources import Reply

from .models import STEP_TOKEN, Truth

pytestmark = pytest.mark.anyio
SAMPLE = Sample([{"role": "user", "content": "17 + 25?"}], "It is 42.", ground_truth="42")
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


def judged_at(url: str, model: str, **source: Any) -> dict[str, Any]:
    node = {"kind": "openai", "base_url": url, "model": model, "timeouts": {"total_s": 300}, **source}
    judge = {"kind": "llm", "max_tokens": 64, "invalid_retries": 1, "instructions": "Is the response right?"}
    return {"sources": {"judge": node}, "judges": {"quality": judge}, "engine": {"deadline_s": 600, "seed": 1}}


@pytest.mark.parametrize(
    "source",
    [{"dialect": "openai"}, {"dialect": "openai", "stream": True}, {"dialect": "responses"}, {"dialect": "anthropic"}],
)
async def test_vllm_answers_each_dialect(served, source):
    """The weights are random, so the text is no verdict; request and reply are understood on both sides."""
    config = judged_at(f"{served('chat')}/v1", "chat", **source)
    async with RewardEngine(config) as engine:
        judge = engine.judges["quality"]
        reply: Reply = await engine.upstreams["judge"].source.send(
            judge.request(SAMPLE, attempt=0), on_sent=lambda: None
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
        judged_at(f"{served('llama')}/v1", "llama", parameters=parameters, limits=limits)
    ) as engine:
        outcome = await engine.score(SAMPLE)
    assert isinstance(outcome, Scored), outcome
    assert 0 <= outcome.verdict.score <= 1
    assert outcome.verdict.rationale in ("It is right.", "It is wrong.")
    assert outcome.verdict.model == "llama"
    assert outcome.verdict.usage.completion_tokens > 0


# Reward models

TOLERANCE = 1e-2
QUESTION = "What is 17 + 25?"
RESPONSES = (
    "It is 42.",
    "First we add 17 and 20.\n\nThen we add 5.\n\nThe answer is 42.",
    "Ich weiß es nicht 🙂\n\n\n\n  vielleicht 43?",
    "soup " * 200,
)
TOO_LONG = "word " * 3000


def samples(*responses: str) -> list[Sample]:
    return [Sample([{"role": "user", "content": QUESTION}], response) for response in responses]


@pytest.fixture(scope="session")
def truths(models: Path) -> Callable[[str], Truth]:
    known: dict[str, Truth] = {}

    def truth(name: str) -> Truth:
        if name not in known:
            known[name] = Truth(models / name)
        return known[name]

    return truth


def configured(url: str, model: str, judge: Mapping[str, Any] | None = None, **source: Any) -> dict[str, Any]:
    node = {"kind": "reward_model", "base_url": url, "model": model, "timeouts": {"total_s": 60}, **source}
    return {
        "sources": {"rm": node},
        "judges": {"quality": {"kind": "reward_model", **(judge or {})}},
        "engine": {"deadline_s": 300},
    }


async def scored(config: Any, *responses: str) -> list[Any]:
    async with RewardEngine(config) as engine:
        return await engine.score_all(samples(*responses))


@pytest.mark.parametrize("rendered", ["by the server", "here"])
@pytest.mark.parametrize(("model", "label"), [("one_logit", None), ("two_labels", 0), ("two_labels", 1)])
async def test_scores_are_the_logits_of_transformers(served, truths, models, rendered, model, label):
    template = {"chat_template": str(models / model)} if rendered == "here" else {}
    config = configured(served(model), model, {"label": label}, **template)
    outcomes = await scored(config, *RESPONSES)
    truth = truths(model)
    expected = [truth.logits(truth.rendered(QUESTION, response))[label or 0] for response in RESPONSES]
    assert [outcome.reward for outcome in outcomes] == pytest.approx(expected, rel=TOLERANCE, abs=TOLERANCE)
    print(f"\n{max(abs(outcome.reward - one) for outcome, one in zip(outcomes, expected, strict=True)):.1e}", end="")


async def test_two_texts_are_joined(served, truths):
    outcomes = await scored(configured(served("one_logit"), "one_logit", protocol="vllm_score"), *RESPONSES)
    expected = [truths("one_logit").logits(QUESTION + response)[0] for response in RESPONSES]
    assert [outcome.reward for outcome in outcomes] == pytest.approx(expected, rel=TOLERANCE, abs=TOLERANCE)


@pytest.mark.parametrize("protocol", ["vllm_classify", "vllm_score"])
async def test_a_text_that_is_too_long_is_the_failure_of_its_sample(served, protocol):
    config = configured(served("one_logit"), "one_logit", protocol=protocol)
    outcomes = await scored(config, RESPONSES[0], TOO_LONG, RESPONSES[1])
    assert [outcome.reward is None for outcome in outcomes] == [False, True, False]
    assert "maximum context length" in outcomes[1].detail


@pytest.mark.parametrize("step_token", [None, STEP_TOKEN])
@pytest.mark.parametrize("reduce", ["last", "min", "mean"])
async def test_steps_are_scored_where_transformers_scores_them(served, truths, models, step_token, reduce):
    """A step is scored at the token that holds the last character of its separator."""
    token = {} if step_token is None else {"step_token": step_token}
    source = {"protocol": "vllm_steps", "chat_template": str(models / "process"), **token}
    judge = {"label": 1, "reduce": reduce}
    outcomes = await scored(configured(served("process"), "process", judge, **source), *RESPONSES)
    truth, mark = truths("process"), step_token or "\n\n"
    for response, outcome in zip(RESPONSES, outcomes, strict=True):
        texts = [step for step in response.split("\n\n") if step.strip()]
        whole = truth.rendered(QUESTION, "".join(step + mark for step in texts))
        spans, logits = truth.spans(whole), truth.logits(whole)
        end, expected = whole.index("assistant\n") + len("assistant\n"), []
        for step in texts:
            end += len(step + mark)
            (position, *_) = (place for place, span in enumerate(spans) if span[0] < end <= span[1])
            expected.append(logits[position][1])
        assert isinstance(outcome, Scored)
        assert [score for _, score in outcome.verdict.steps] == pytest.approx(expected, rel=TOLERANCE, abs=TOLERANCE)
        reduced = {"last": expected[-1], "min": min(expected), "mean": math.fsum(expected) / len(expected)}[reduce]
        assert outcome.reward == pytest.approx(reduced, rel=TOLERANCE, abs=TOLERANCE)
        assert [offset for offset, _ in outcome.verdict.steps] == [response.index(step) + len(step) for step in texts]
