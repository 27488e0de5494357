"""Rollouts and trainings on the stand-in of verl, and verl's own configuration where it is installed."""

from __future__ import annotations

import os
from types import SimpleNamespace

import numpy as np
import pytest

from qreward_plugins.testing import FakeVerlTrainer, VerlDataProto
from qreward_plugins.testing.data_proto import VerlColumns, padded

# Ray phones home and verl imports optional parts with a word; neither belongs to a test.
os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
os.environ.setdefault("HF_HUB_OFFLINE", "1")


class CharacterTokenizer:
    """One token a character: what is decoded is what was encoded."""

    def decode(self, ids, skip_special_tokens=True):
        return "".join(chr(int(token)) for token in ids if int(token) > 0)


@pytest.fixture
def tokenizer():
    return CharacterTokenizer()


@pytest.fixture
def make_data():
    """Build the batch of some rollouts, padded on the right as verl pads several outputs."""

    def make(responses, *, data_source="test/add", columns=None):
        prompt, count = "What is 17 plus 25?", len(responses)
        prompts, written = padded([[*map(ord, prompt)]] * count), padded([[*map(ord, text)] for text in responses])
        mask = padded([[1] * (len(prompt) + len(text)) for text in responses], width=len(prompt) + written.shape[1])
        values = {
            "data_source": [data_source] * count,
            "reward_model": [{"style": "rule", "ground_truth": "42"}] * count,
            "extra_info": [{"index": 3, "split": "train"}] * count,
            "raw_prompt": [[{"role": "user", "content": prompt}]] * count,
            "uid": ["u1"] * count,
            "global_steps": [5] * count,
            "__num_turns__": [2] * count,
            "tool_extra_fields": [{"weight_version": 1}] * count,
            "response_len": [*map(len, responses)],
            **(columns or {}),
        }
        non_tensor = {}
        for key, column in values.items():
            non_tensor[key] = np.empty(count, dtype=object)
            non_tensor[key][:] = column
        tensors = {"prompts": prompts, "responses": written, "attention_mask": mask}
        return VerlDataProto(VerlColumns(tensors, count), non_tensor)

    return make


ROW = {"prompt": "What is 17 plus 25?", "ground_truth": "42", "data_source": "test/add", "extra_info": {"index": 3}}


@pytest.fixture
def run():
    """Have `FakeVerlTrainer` score responses to one question, and return what came of each: the manager's result, or
    the exception for which V1 dropped it. At least one must be left. `row`: other columns of the question.
    """

    def run(responses, *overrides, row=None, **named):
        ours = [
            "+reward_manager=qreward",
            "data.train_batch_size=1",
            "reward.num_workers=1",
            "actor_rollout_ref.rollout.agent.num_workers=1",
            f"actor_rollout_ref.rollout.n={len(responses)}",
        ]
        named.setdefault("respond", lambda draft, rng: responses[draft.number])
        with FakeVerlTrainer([*ours, *overrides], rows=[{**ROW, **(row or {})}], **named) as fake:
            step = fake.step()
        results = {session: error for _, session, error in step.dropped}
        for place, session in enumerate(step.sessions):
            results[session] = {"reward_score": step.scores[place], "reward_extra_info": step.extra_info[place]}
        return [results[number] for number in range(len(responses))]

    return run


@pytest.fixture
def any_function(tmp_path):
    """The override that names a reward function. Without one, verl asks no manager beside its own reward model."""
    path = tmp_path / "any.py"
    path.write_text("def compute_score(**_):\n    return 0.0\n")
    return f"reward.custom_reward_function.path={path}"


@pytest.fixture
def compose():
    """Compose verl's own trainer configuration with these overrides, as `main_ppo` does."""
    pytest.importorskip("verl", reason="verl is not installed (pip install 'qreward-plugins[demo]')")
    from hydra import compose as hydra_compose
    from hydra import initialize_config_module

    def make(*overrides):
        with initialize_config_module("verl.trainer.config", version_base=None):
            return hydra_compose("ppo_trainer", overrides=list(overrides))

    return make


def judged_by(**servers):
    """The overrides that point an inline qreward tree at judge servers."""
    overrides = ["reward.reward_manager.name=qreward", "+qreward.judges.quality.kind=llm", "+qreward.engine.seed=7"]
    for name, server in servers.items():
        source = f"{{kind: openai, base_url: '{server.base_url}', model: judge}}"
        overrides.append(f"+qreward.sources.{name}={source}")
    return overrides


@pytest.fixture
def judge_overrides():
    return judged_by


def said(text):
    """Stands for the `ResponseTokens` of a row whose response is this text."""
    return SimpleNamespace(text=text, turns=tuple, decode=lambda ids: "?")
