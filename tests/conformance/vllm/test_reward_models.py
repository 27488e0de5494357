"""Reward models behind a real vLLM: the scores are the logits that transformers computes from the same files."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest

from qreward_plugins import RewardEngine, Sample, Scored

from .models import STEP_TOKEN

pytestmark = pytest.mark.anyio
TOLERANCE = 1e-2
QUESTION = "What is 17 + 25?"
RESPONSES = (
    "It is 42.",
    "First we add 17 and 20.\n\nThen we add 5.\n\nThe answer is 42.",
    "Ich weiß es nicht 🙂\n\n\n\n  vielleicht 43?",
    "soup " * 200,
)
TOO_LONG = "word " * 3000


def messages(response: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": QUESTION}, {"role": "assistant", "content": response}]


def samples(*responses: str) -> list[Sample]:
    return [Sample([{"role": "user", "content": QUESTION}], response) for response in responses]


class Truth:
    """The logits of a model as transformers computes them, in float32."""

    def __init__(self, folder: Path) -> None:
        import torch
        import transformers

        architecture = json.loads((folder / "config.json").read_text())["architectures"][0]
        self._torch = torch
        self.tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
        self._model = getattr(transformers, architecture).from_pretrained(folder, dtype=torch.float32).eval()

    def logits(self, text: str) -> Any:
        """The logits of a text: a list, or for a token classifier a list for every token."""
        ids = self.tokenizer(text, add_special_tokens=False)["input_ids"]
        with self._torch.no_grad():
            return self._model(self._torch.tensor([ids])).logits[0].tolist()

    def spans(self, text: str) -> list[tuple[int, int]]:
        """The characters of each token."""
        encoded = self.tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)
        return [(start, end) for start, end in encoded["offset_mapping"]]

    def rendered(self, response: str) -> str:
        return str(self.tokenizer.apply_chat_template(messages(response), tokenize=False))


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
    expected = [truth.logits(truth.rendered(response))[label or 0] for response in RESPONSES]
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
        whole = truth.rendered("".join(step + mark for step in texts))
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
