"""A judge on the GPUs of a real verl trainer sleeps whenever the trainer uses them, and is awake for every reward."""

from __future__ import annotations

import pytest
import yaml

from tests.replicas.conftest import StandIns

from .trainings import NEEDS_VERL, prepared, train

pytestmark = NEEDS_VERL

STEPS = 2
MODES = {
    "sync": (),
    "colocate_async": ("trainer.v1.trainer_mode=colocate_async",),
    "legacy": ("trainer.use_v1=False",),
}


@pytest.mark.parametrize("mode", MODES)
def test_the_judge_sleeps_while_verl_trains(mode, tmp_path):
    stand_ins = StandIns(tmp_path)
    tree = stand_ins.tree(colocated=True, sleep_mode=True, data_parallel=1, start_within_s=300)
    outcome = train(
        prepared(tmp_path, val_questions=8),
        tmp_path / "out",
        yaml.safe_dump(tree),
        *MODES[mode],
        steps=STEPS,
        VERL_PHASES=str(tmp_path / "notes"),
    )
    assert outcome.error == ""
    events = [line.split()[1].partition("?")[0] for line in stand_ins.notes()]
    events = [event for event in events if event in ("/sleep", "/wake_up", "/_compute_old_log_prob", "/_update_actor")]
    assert events == ["/sleep", "/_compute_old_log_prob", "/_update_actor", "/wake_up"] * STEPS
    assert outcome.told("qreward/failed_rate") == [0.0] * STEPS
    assert set(outcome.told("qreward/val/failed_rate")) == {0.0}
    assert stand_ins.living() == [], "the servers end with the training"
