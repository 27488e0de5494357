"""Two steps of TRL's own `GRPOTrainer` on the CPU, where TRL is installed, with a tiny random model made here."""

from __future__ import annotations

import zlib
from types import SimpleNamespace

import pytest

from qreward_plugins.bridges.trl import reward
from qreward_plugins.engine.process_portals import close_process_portals
from qreward_plugins.testing import JudgeServer, PlayFault

trl = pytest.importorskip("trl")
np = pytest.importorskip("numpy")

# Warnings of TRL and its libraries are not ours.
pytestmark = [pytest.mark.trainer, pytest.mark.filterwarnings("ignore")]

N = 4
WORDS = ["zero", "one", "two", "three", "four", "five", "six", "seven", "plus", "is", "?"]
ROWS = [{"prompt": f"{word} plus one is ?", "answer": word} for word in WORDS[:8]]


def by_hash(call):
    """A number for a response, or for a quarter of them a refusal."""
    number = zlib.crc32(call.blocks["response"].encode()) % 64
    if number < 16:
        raise PlayFault("error_422")
    return number / 64


def trained(tmp_path, scorer, *others, **settings):
    """Train two steps. Returns rewards, advantages and rewards of `others` of each step, the metrics, and whether a
    weight has changed.
    """
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
            by_name = trainer._logs["rewards"]
            more = [list(by_name[other.__name__]) for other in others]
            steps.append((list(by_name["qreward"]), list(trainer._logs["advantages"]), *more))

    with JudgeServer(scorer) as server:
        source = {"kind": "openai", "base_url": server.base_url, "model": "judge"}
        judge = {"kind": "llm", "score_range": [0, 1], "reward_range": [0, 1]}
        function = reward({"sources": {"a": source}, "judges": {"quality": judge}}, ground_truth="answer")
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
            **settings,
        )
        trainer = trl.GRPOTrainer(
            model=model,
            reward_funcs=[function, *others],
            args=args,
            train_dataset=Dataset.from_list(ROWS),
            processing_class=tokenizer,
            callbacks=[Kept()],
        )
        trainer.train()
        assert server.report().requests
    changed = any(not torch.equal(old, new) for old, new in zip(before, model.parameters(), strict=True))
    assert all(torch.isfinite(parameter).all() for parameter in model.parameters())
    return SimpleNamespace(steps=steps, log=trainer.state.log_history, changed=changed)


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


@pytest.fixture(autouse=True)
def closed():
    yield
    close_process_portals()


def test_a_failed_sample_has_no_vote(tmp_path):
    run = trained(tmp_path, by_hash, log_completions=True)
    assert len(run.steps) == 2
    for rewards, advantages in run.steps:
        failed = np.isnan(rewards)
        assert 0 < failed.sum() < len(rewards) == 4 * N
        assert not np.any(np.asarray(advantages)[failed])
        np.testing.assert_allclose(advantages, advantages_of(rewards), atol=1e-4)
    first = run.log[0]
    assert first["qreward/failed_rate"] == pytest.approx(np.isnan(run.steps[0][0]).mean())
    assert first["rewards/qreward/mean"] == pytest.approx(np.nanmean(run.steps[0][0]), abs=1e-5)
    assert run.changed
