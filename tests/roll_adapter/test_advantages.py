"""The advantages of ROLL's pipeline in the journal. A whole run of ROLL's own is in the conformance tests."""

from __future__ import annotations

import sys
from types import SimpleNamespace

import numpy as np
import pytest
import torch

NAME = "roll.pipeline.rlvr.rlvr_pipeline"
MASK = torch.tensor([[1, 1, 0], [0, 0, 0]])


@pytest.fixture
def compute(monkeypatch):
    """Record the advantages of a pipeline that was imported before the worker; returns what it records."""
    from roll_adapter import advantages

    def compute_advantage(data, pipeline_config, response_mask):
        data.batch["advantages"] = torch.tensor([[0.5, 1.5, 9.0], [7.0, 7.0, 7.0]])
        return data

    pipeline, recorded = SimpleNamespace(compute_advantage=compute_advantage), []
    monkeypatch.setitem(sys.modules, NAME, pipeline)
    monkeypatch.setattr(advantages, "TrainingLog", lambda path: SimpleNamespace(add=recorded.extend))
    advantages.record_advantages(lambda config: config.worker_cls == "ours")

    def computed(*, records=True, **columns):
        source = {"kind": "function", "function": "math:fsum"}
        engine = {"journal": {"path": "verdicts.sqlite"}} if records else {}
        tree = {"sources": {"a": source}, "judges": {"j": {"kind": "function"}}, "engine": engine}
        ours = SimpleNamespace(worker_cls="ours", reward_manager_config=[tree])
        config = SimpleNamespace(rewards={"ours": ours, "theirs": SimpleNamespace(worker_cls="theirs")})
        columns = {"domain": ["ours"] * 2, "rollout_id": ["r0", "r1"], "id": [7, 7], **columns}
        arrays = {name: np.array(values, dtype=object) for name, values in columns.items() if values}
        batch = {"response_level_rewards": torch.tensor([0.25, 0.75])}
        data = SimpleNamespace(batch=batch, non_tensor_batch=arrays, meta_info={})
        assert pipeline.compute_advantage(data, pipeline_config=config, response_mask=MASK) is data
        return [tuple(trained) for trained in recorded]

    return computed


@pytest.mark.parametrize(
    ("columns", "rows"),
    [
        ({}, [("r0", "7", None, 0.25, 1.0, False), ("r1", "7", None, 0.75, None, True)]),
        ({"rollout_id": None}, []),
        ({"domain": ["theirs"] * 2}, []),
    ],
)
def test_the_mean_over_the_tokens_is_recorded_of_our_samples(compute, columns, rows):
    assert compute(**columns) == rows


def test_the_next_pipeline_of_a_process_has_a_journal_of_its_own(compute):
    assert compute(records=False) == []
    assert len(compute()) == 2


def test_what_cannot_be_recorded_costs_the_record_only(compute, caplog):
    assert compute(domain=["unknown"] * 2) == []
    assert [record.getMessage() for record in caplog.records] == ["advantages are not recorded: KeyError: 'unknown'"]
