"""Real verl, real DataProto; a tokenizer of characters and judge servers on loopback."""

from __future__ import annotations

import os
import sys

import pytest

from qreward_plugins.testing import FakeVerlTrainer

# Ray phones home and verl imports optional parts with a word; neither belongs to a test.
os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
os.environ.setdefault("HF_HUB_OFFLINE", "1")

pytest.importorskip("verl", reason="verl is not installed (pip install 'qreward-plugins[demo]')")


class CharacterTokenizer:
    """One token a character: what is decoded is what was encoded."""

    def decode(self, ids, skip_special_tokens=True):
        return "".join(chr(int(token)) for token in ids if int(token) > 0)

    def batch_decode(self, batch, skip_special_tokens=True):
        return [self.decode(ids) for ids in batch]


@pytest.fixture
def tokenizer():
    return CharacterTokenizer()


@pytest.fixture
def make_data():
    """Build the DataProto of some rollouts, padded on the right as verl pads several outputs."""
    import numpy as np
    import torch
    from tensordict import TensorDict
    from verl import DataProto

    def make(responses, *, data_source="test/add", ground_truth="42", uid="u1", columns=None, response_len=True):
        prompt = "What is 17 plus 25?"
        width = max(map(len, responses))
        count = len(responses)
        prompts = torch.tensor([[ord(c) for c in prompt]] * count)
        padded = torch.tensor([[ord(c) for c in text] + [0] * (width - len(text)) for text in responses])
        mask = torch.tensor([[1] * (len(prompt) + len(text)) + [0] * (width - len(text)) for text in responses])
        batch = TensorDict(
            {
                "prompts": prompts,
                "responses": padded,
                "attention_mask": mask,
                "input_ids": torch.cat([prompts, padded], dim=1),
                "position_ids": mask.cumsum(-1) - 1,
            },
            batch_size=count,
        )
        messages = [{"role": "user", "content": prompt}]
        values = {
            "data_source": [data_source] * count,
            "reward_model": [{"style": "rule", "ground_truth": ground_truth}] * count,
            "extra_info": [{"index": 3, "split": "train"}] * count,
            "raw_prompt": [messages] * count,
            "uid": [uid] * count if isinstance(uid, str) else uid,
            "global_steps": [5] * count,
            "__num_turns__": [2] * count,
            "tool_extra_fields": [{"weight_version": 1}] * count,
            **(columns or {}),
        }
        if response_len:
            values["response_len"] = [len(text) for text in responses]
        non_tensor = {}
        for key, column in values.items():
            array = np.empty(count, dtype=object)
            array[:] = column
            non_tensor[key] = array
        return DataProto(batch=batch, non_tensor_batch=non_tensor)

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
            if not step.padding[place]:
                result = {"reward_score": step.scores[place], "reward_extra_info": step.extra_info[place]}
                results[session] = result
        return [results[number] for number in range(len(responses))]

    return run


@pytest.fixture
def compose():
    """Compose verl's own trainer configuration with these overrides, as `main_ppo` does."""
    from hydra import compose as hydra_compose
    from hydra import initialize_config_module

    def make(*overrides):
        with initialize_config_module("verl.trainer.config", version_base=None):
            return hydra_compose("ppo_trainer", overrides=list(overrides))

    return make


@pytest.fixture
def judge_overrides():
    """The overrides that point an inline qreward tree at judge servers."""

    def make(**servers):
        overrides = ["reward.reward_manager.name=qreward", "+qreward.judges.quality.kind=llm", "+qreward.engine.seed=7"]
        for name, server in servers.items():
            overrides += [
                f"+qreward.sources.{name}.kind=openai",
                f"+qreward.sources.{name}.base_url={server.base_url}",
                f"+qreward.sources.{name}.model=judge",
            ]
        return overrides

    return make


@pytest.fixture(autouse=True)
def command_line(monkeypatch):
    monkeypatch.setattr(sys, "argv", ["pytest"])
