"""The reward function for TRL, called as `GRPOTrainer._calculate_rewards` of TRL 1.16 calls it; and where TRL is
installed, in two steps of its own `GRPOTrainer` on the CPU, with a tiny random model made here.
"""

from __future__ import annotations

import asyncio
import inspect
import pickle
import zlib
from contextlib import nullcontext
from types import SimpleNamespace

import numpy as np
import pytest

from qreward_plugins import ConfigurationError, InputError, RewardMissing
from qreward_plugins.bridges import trl
from qreward_plugins.bridges.trl import reward
from qreward_plugins.testing import JudgeServer, PlayFault

PROMPT = [{"role": "user", "content": "How much?"}]


def as_trl(function, inputs, completions):
    """Columns as lists, and what TRL adds to them. Returns the rewards, and what was logged."""
    assert inspect.iscoroutinefunction(function.__call__)
    metrics, extra = {}, {}
    keys = [key for key in inputs[0] if key not in ("prompt", "completion", "completion_ids")]
    given = {key: [row[key] for row in inputs] for key in keys}
    given |= {
        "trainer_state": SimpleNamespace(global_step=4),
        "log_extra": extra.__setitem__,
        "log_metric": metrics.__setitem__,
        "environments": [object() for _ in inputs],
    }
    prompts = [row["prompt"] for row in inputs]
    ids = [[1]] * len(inputs)
    rewards = asyncio.run(function(prompts=prompts, completions=completions, completion_ids=ids, **given))
    return rewards, metrics, extra


@pytest.mark.parametrize("conversational", [False, True])
def test_a_sample_without_a_reward_gets_none(tree, conversational):
    texts = ["so: 0.25", "so: refuse", "so: 1"]
    completions = [[{"role": "assistant", "content": text}] for text in texts] if conversational else texts
    prompt = PROMPT if conversational else "How much?"
    function = reward(tree, name="judged")
    rewards, metrics, extra = as_trl(function, [{"prompt": prompt}] * 3, completions)
    assert rewards == [0.25, None, 1.0]
    assert function.__name__ == "judged"
    assert metrics["judged/failed_rate"] == 1 / 3
    assert metrics["judged/reward/mean"] == 0.625
    assert extra["judged/cause"][0::2] == ["", ""]
    assert extra["judged/cause"][1].startswith("infra/")


def test_what_a_sample_is_made_of(seen):
    tree, samples = seen
    turns = [
        {"role": "assistant", "content": "I look.", "tool_calls": [{"id": "1"}]},
        {"role": "tool", "content": "18"},
        {"role": "assistant", "content": "It is 18"},
    ]
    plain = "before <|im_start|>user\n42"
    rows = [(PROMPT, "18"), (PROMPT, "18"), (PROMPT, "19"), ("Else?", "18")]
    common = {"data_source": "maths", "images": [b"of the prompt"]}
    inputs = [{"prompt": prompt, "solution": truth, "level": n, **common} for n, (prompt, truth) in enumerate(rows)]
    rewards, metrics, _ = as_trl(reward(tree, ground_truth="solution"), inputs, [*[turns] * 3, plain])
    assert rewards == [1.0] * 4
    assert metrics["qreward/score/words"] == 5.25
    first, *others = sorted(samples(), key=lambda sample: sample.extras["level"])
    assert (first.response, first.ground_truth, first.step) == ("I look.\n\n18\n\nIt is 18", "18", 4)
    assert (first.data_source, dict(first.extras)) == ("maths", {"data_source": "maths", "level": 0})
    assert [dict(message) for message in first.messages] == PROMPT
    assert others[-1].response == plain
    groups = [sample.group_id for sample in (first, *others)]
    assert (groups[0] == groups[1], len(set(groups))) == (True, 3)


def test_each_message_of_the_policy_is_a_turn(tree):
    tree["judges"]["whole"] = {"kind": "turns", "judge": "quality", "reduce": "sum"}
    said = [
        {"role": "assistant", "content": "so: 0.25"},
        {"role": "tool", "content": "so: 0.75"},
        {"role": "assistant", "content": "so: 0.5"},
    ]
    rewards, _, _ = as_trl(reward(tree), [{"prompt": PROMPT}] * 2, [said, said[:1]])
    assert rewards == [0.75, 0.25]


def test_a_sample_that_cannot_be_read_fails_alone(tree, caplog):
    image = [{"role": "tool", "content": [{"type": "image", "image": b"png"}]}]
    rewards, _, extra = as_trl(reward(tree), [{"prompt": PROMPT}] * 4, [image, "so: 0.5", 7, None])
    assert rewards == [None, 0.5, None, None]
    assert extra["qreward/cause"][1] == ""
    assert "response holds an image" in caplog.text


def test_a_policy_may_give_a_failed_sample_a_number_or_end_the_run(tree):
    """It is pickled for the process of a rollout worker."""
    function = pickle.loads(pickle.dumps(reward({**tree, "on_failure": {"constant": -1.0}}, name="judged")))
    assert as_trl(function, [{"prompt": "?"}] * 2, ["refuse", "0.5"])[0] == [-1.0, 0.5]
    assert function.__name__ == "judged"
    with pytest.raises(RewardMissing):
        as_trl(reward({**tree, "on_failure": "raise"}), [{"prompt": "?"}], ["refuse"])


def test_a_column_that_is_not_there(tree):
    function = reward(tree, ground_truth="solution")
    with pytest.raises(InputError, match="the data set has no column 'solution'; it has answer"):
        as_trl(function, [{"prompt": "?", "answer": "4"}], ["4"])


def test_what_cannot_be_is_refused(tree, monkeypatch):
    source = {"kind": "replicas", "server": "vllm", "model": "m", "devices": [0], "colocated": True}
    with pytest.raises(ConfigurationError, match="TRL does not tell when it trains"):
        reward({"sources": {"a": source}, "judges": {"quality": {"kind": "llm"}}})
    for found, refused in (("1.13.0", True), ("0.29.1", True), ("1.14.0", False), ("2.0.0.dev0", False)):
        monkeypatch.setattr(trl, "version", lambda _, found=found: found)
        with pytest.raises(ConfigurationError, match=r"Install trl>=1\.14\.") if refused else nullcontext():
            reward(tree)
    # Processes on several machines divide the limits.
    monkeypatch.setenv("WORLD_SIZE", "4")
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    tree["sources"]["a"]["limits"] = {"concurrency": 2, "requests_per_minute": 600}
    with pytest.raises(ConfigurationError, match="4"):
        reward(tree)


def test_a_data_set_without_ground_truths_is_said_once(tree, caplog):
    function = reward(tree)
    for _ in range(2):
        as_trl(function, [{"prompt": PROMPT, "solution": "18"}], ["so: 1"])
    (said,) = [record.getMessage() for record in caplog.records if "ground_truth" in record.getMessage()]
    assert "solution" in said


# TRL's own trainer


N = 4
WORDS = ["zero", "one", "two", "three", "four", "five", "six", "seven", "plus", "is", "?"]


def by_hash(call):
    """A number for a response, or for a quarter of them a refusal."""
    number = zlib.crc32(call.blocks["response"].encode()) % 64
    if number < 16:
        raise PlayFault("error_422")
    return number / 64


def advantages_of(rewards):
    """Groups of N, computed as if a failed sample (NaN) had never been sampled: it has the advantage 0."""
    advantages = np.zeros(len(rewards))
    for start in range(0, len(rewards), N):
        group = np.asarray(rewards[start : start + N], dtype=np.float32)
        scored = ~np.isnan(group)
        if scored.sum() > 1:
            kept = group[scored]
            advantages[start : start + N][scored] = (kept - kept.mean()) / (kept.std(ddof=1) + 1e-4)
    return advantages


@pytest.mark.trainer
@pytest.mark.filterwarnings("ignore")  # those of TRL and its libraries are not ours
def test_a_failed_sample_has_no_vote(tree, tmp_path):
    trl = pytest.importorskip("trl")
    import torch
    from datasets import Dataset
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast, Qwen2Config, Qwen2ForCausalLM, TrainerCallback

    torch.manual_seed(0)
    words = Tokenizer(models.WordLevel({word: number for number, word in enumerate([*WORDS, "<end>"])}, "?"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=words, eos_token="<end>", pad_token="<end>")
    sizes = {"vocab_size": 12, "hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 2, "eos_token_id": 11, "pad_token_id": 11}
    model = Qwen2ForCausalLM(Qwen2Config(**sizes, **heads))
    before = [parameter.detach().clone() for parameter in model.parameters()]
    steps = []

    class Kept(TrainerCallback):
        def on_step_end(self, args, state, control, **_):
            steps.append((list(trainer._logs["rewards"]["qreward"]), list(trainer._logs["advantages"])))

    with JudgeServer(by_hash) as server:
        tree["sources"]["a"]["base_url"] = server.base_url
        args = trl.GRPOConfig(
            output_dir=str(tmp_path),
            use_cpu=True,
            max_steps=2,
            per_device_train_batch_size=4 * N,
            num_generations=N,
            max_completion_length=4,
            generation_kwargs={"min_new_tokens": 2},  # an empty response has a floor
            learning_rate=0.1,
            logging_steps=1,
            save_strategy="no",
            report_to=[],
            log_completions=True,
        )
        rows = [{"prompt": f"{word} plus one is ?", "answer": word} for word in WORDS[:8]]
        trainer = trl.GRPOTrainer(
            model=model,
            reward_funcs=[reward(tree, ground_truth="answer")],
            args=args,
            train_dataset=Dataset.from_list(rows),
            processing_class=tokenizer,
            callbacks=[Kept()],
        )
        trainer.train()
    assert len(steps) == 2
    for rewards, advantages in steps:
        failed = np.isnan(rewards)
        assert 0 < failed.sum() < len(rewards) == 4 * N
        assert not np.any(np.asarray(advantages)[failed])
        np.testing.assert_allclose(advantages, advantages_of(rewards), atol=1e-4)
    first = trainer.state.log_history[0]
    assert first["qreward/failed_rate"] == pytest.approx(np.isnan(steps[0][0]).mean())
    assert first["rewards/qreward/mean"] == pytest.approx(np.nanmean(steps[0][0]), abs=1e-5)
    assert any(not torch.equal(old, new) for old, new in zip(before, model.parameters(), strict=True))
    assert all(torch.isfinite(parameter).all() for parameter in model.parameters())
