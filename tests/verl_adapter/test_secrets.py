"""No key that verl hands to a reward function comes out of qreward, however the function echoes it (finding 24)."""

from __future__ import annotations

import logging
from functools import partial

import pytest
from omegaconf import OmegaConf

from qreward_plugins.testing import FakeVerlTrainer
from verl_adapter.functions import reward_secrets

KEY, PASSWORD, FROM_ENV, NESTED = (
    "sk-live-4f7a90bb21c3",
    "hunter2-very-long",
    "tok_0123456789abcdef",
    "nested-9e8d7c6b5a",
)
ALL = (KEY, PASSWORD, FROM_ENV, NESTED)

FUNCTION = """
def compute_score(data_source, solution_str, ground_truth, extra_info, **given):
    everything = f"{given}"
    if solution_str == "raise":
        raise RuntimeError(everything)
    if solution_str == "key":
        raise KeyError(given["api_key"])
    if solution_str == "timeout":
        raise TimeoutError(everything)
    if solution_str == "wrong":
        return everything
    return {"score": 1.0, "note": everything, "list": [everything], given["api_key"]: 2.0}

async def compute_async(**row):
    return compute_score(**row)
"""
TEXTS = ("raise", "key", "timeout", "wrong")


def overrides(path, node, trainer, name, mode):
    return [
        "reward.reward_manager.name=qreward",
        "algorithm.adv_estimator=grpo",
        "reward.num_workers=1",
        f"{node}.path={path}",
        f"{node}.name={name}",
        f"+{node}.reward_kwargs.api_key={KEY}",
        f"+{node}.reward_kwargs.url='https://me:{PASSWORD}@service.example/v1'",
        f"+{node}.reward_kwargs.header='X-Mine: ${{oc.env:MY_SERVICE_TOKEN}}'",
        f"+{node}.reward_kwargs.services=[{{name: one, token: {NESTED}}}]",
        f"+qreward.sources.compute_score={{kind: function, function: 'verl_adapter:compute_score', mode: {mode}}}",
        "+qreward.sources.compute_score.workers=1",
        "+qreward.sources.compute_score.version='1'",
        "+qreward.judges.compute_score={kind: function, sources: [compute_score]}",
        "+qreward.engine={max_attempts: 1, deadline_s: 20}",
        trainer,
    ]


@pytest.mark.parametrize(
    ("name", "mode", "trainer"),
    [
        ("compute_score", "process", "trainer.use_v1=True"),
        ("compute_score", "thread", "trainer.use_v1=False"),
        ("compute_async", "process", "trainer.use_v1=False"),
    ],
)
def test_what_a_function_echoes_of_its_keys_is_redacted(tmp_path, monkeypatch, caplog, capfd, name, mode, trainer):
    monkeypatch.setenv("MY_SERVICE_TOKEN", FROM_ENV)
    path = tmp_path / "mine.py"
    path.write_text(FUNCTION)
    journal = tmp_path / "journal"
    caplog.set_level(logging.DEBUG)
    told = []
    respond = lambda draft, rng: TEXTS[draft.number] if draft.global_step == 1 else "fine"  # noqa: E731
    tree = overrides(path, "reward.custom_reward_function", trainer, name, mode)
    tree.append(f"+qreward.engine.journal.path={journal}")
    with FakeVerlTrainer(tree, respond=respond) as fake:
        failed, fine = fake.step(), fake.step()
        told += [repr(fake.tracked), repr(failed.extra_info), repr(fine.extra_info)]
        told += [repr(manager.engine) + repr(manager.engine.config) for manager in fake.reward_managers]
    assert {info["qreward/failed"] for info in failed.extra_info} == {1.0}
    assert {info["qreward/failed"] for info in fine.extra_info} == {0.0}
    assert "***" in told[2], "the note is still there"
    out, err = capfd.readouterr()
    told += [out, err, caplog.text]
    recorded = b"".join(file.read_bytes() for file in tmp_path.rglob("journal*") if file.is_file())
    assert recorded
    for secret in ALL:
        for text in told:
            assert secret not in text
        assert secret.encode() not in recorded


def test_the_secrets_of_older_versions_are_in_what_they_hand_over():
    """verl up to 0.7 binds `reward_kwargs` in a closure, and tells its manager no configuration."""
    given = {"api_key": KEY, "scale": 2.0, "mode": "plain words"}

    def compute_score(**row):
        return 1.0

    def wrapped(**row):
        return compute_score(**row, **given)

    assert set(reward_secrets(None, wrapped)) == {KEY}
    assert set(reward_secrets(None, partial(wrapped, token=NESTED))) == {KEY, NESTED}
    assert set(reward_secrets(None, partial(compute_score, OmegaConf.create({"a": {"hf_token": NESTED}})))) == {NESTED}
    assert reward_secrets(None, compute_score) == ()
    assert reward_secrets(None, None) == ()


def test_the_keys_of_the_older_node_and_of_the_sandbox_count_too():
    trainer = OmegaConf.create(
        {
            "reward": {"sandbox_fusion": {"url": f"https://x:{PASSWORD}@sandbox.example"}},
            "custom_reward_function": {"path": "a.py", "reward_kwargs": {"api_key": KEY}},
        }
    )
    assert set(reward_secrets(trainer)) == {KEY, f"https://x:{PASSWORD}@sandbox.example"}
