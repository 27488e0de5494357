"""No key that verl hands to a reward function comes out of qreward, however the function echoes it."""

from __future__ import annotations

import logging
from functools import partial

from omegaconf import OmegaConf

from verl_adapter.functions import reward_secrets

KEY, PASSWORD, FROM_ENV, NESTED = (
    "sk-live-4f7a90bb21c3",
    "hunter2-very-long",
    "tok_0123456789abcdef",
    "nested-9e8d7c6b5a",
)
FUNCTION = """
def compute_score(data_source, solution_str, ground_truth, extra_info, **given):
    everything = f"{given}"
    if solution_str == "raise":
        raise RuntimeError(everything)
    return {"score": 1.0, "note": everything, "list": [everything], given["api_key"]: 2.0}
"""


def test_what_a_function_echoes_of_its_keys_is_redacted(run, tmp_path, monkeypatch, caplog, capfd):
    monkeypatch.setenv("MY_SERVICE_TOKEN", FROM_ENV)
    path = tmp_path / "mine.py"
    path.write_text(FUNCTION)
    caplog.set_level(logging.DEBUG)
    node = "reward.custom_reward_function"
    failed, fine = run(
        ["raise", "fine"],
        f"{node}.path={path}",
        f"+{node}.reward_kwargs.api_key={KEY}",
        f"+{node}.reward_kwargs.url='https://me:{PASSWORD}@service.example/v1'",
        f"+{node}.reward_kwargs.header='X-Mine: ${{oc.env:MY_SERVICE_TOKEN}}'",
        f"+{node}.reward_kwargs.services=[{{name: one, token: {NESTED}}}]",
        "+qreward.sources.compute_score={kind: function, function: 'verl_adapter:compute_score', version: '1'}",
        "+qreward.judges.compute_score={kind: function, sources: [compute_score]}",
        f"+qreward.engine={{max_attempts: 1, journal: {{path: {tmp_path}/journal}}}}",
    )
    assert [result["reward_extra_info"]["qreward/failed"] for result in (failed, fine)] == [1.0, 0.0]
    assert "***" in repr(fine), "the note is still there"
    recorded = b"".join(file.read_bytes() for file in tmp_path.rglob("journal*") if file.is_file())
    assert recorded
    for secret in (KEY, PASSWORD, FROM_ENV, NESTED):
        for text in (repr(failed), repr(fine), *capfd.readouterr(), caplog.text):
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
    assert reward_secrets(None, None) == ()
    sandbox = f"https://x:{PASSWORD}@sandbox.example"
    older = {"path": "a.py", "reward_kwargs": {"api_key": KEY}}
    trainer = OmegaConf.create({"reward": {"sandbox_fusion": {"url": sandbox}}, "custom_reward_function": older})
    assert set(reward_secrets(trainer)) == {KEY, sandbox}
