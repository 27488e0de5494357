"""What is done in the trainer's process: with verl's own classes, but for the trainer around them."""

from __future__ import annotations

import importlib
import inspect
import math
import pickle
import sys
import warnings
from types import SimpleNamespace

import pytest

from verl_adapter import trainer_hooks
from verl_adapter.metrics import OutcomeMetrics, warn_once
from verl_adapter.rewards import IMPUTED, MISSING
from verl_adapter.rollouts import PADDING, VALIDATION, is_padding


@pytest.fixture(scope="module", autouse=True)
def imported():
    """verl's trainers tell of every engine that is not installed when they are imported."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        importlib.import_module("verl.trainer.ppo.ray_trainer")
        importlib.import_module("verl.trainer.ppo.v1.trainer_base")


class Counts(OutcomeMetrics):
    """Numbers of an actor that answers this next."""

    def __init__(self):
        super().__init__(None)
        self.answer = ("start", {})
        self.waited = ("start", 0, {})

    def _answer(self, method, *arguments):
        self.asked = (method, *arguments)
        return self.answer if method == "counts" else self.waited


def test_metrics_are_of_what_was_scored_since_the_last():
    numbers = Counts()
    assert numbers.since_last() == {}
    numbers.answer = ("start", {"val/samples": 8, "val/failed": 2, "val/failed/infra": 2})
    assert numbers.since_last()["qreward/val/failed_rate"] == 0.25
    train = {"train/samples": 32, "train/failed": 8, "train/failed/infra": 7, "train/failed/policy": 1}
    numbers.answer = ("start", {**numbers.answer[1], **train, "train/imputed": 6, "train/cut": 4, "train/floor": 2})
    assert numbers.since_last() == {
        "qreward/samples": 32.0,
        "qreward/failed_rate": 0.25,
        "qreward/failed/infra": 7.0,
        "qreward/failed/verdict": 0.0,
        "qreward/failed/policy": 1.0,
        "qreward/cut_rate": 4 / 32,
        "qreward/floor_rate": 2 / 32,
        "qreward/imputed_rate": 6 / 32,
    }
    assert numbers.since_last() == {}
    assert numbers.may_have_imputed()


def test_a_step_tells_what_its_longest_batch_waited_for():
    numbers = Counts()
    numbers.answer = ("start", {"val/samples": 8})
    numbers.waited = ("start", 3, {"blame_s/judge/queue": 2.0})
    assert not any("blame_s" in name for name in numbers.since_last())
    numbers.answer = ("start", {"val/samples": 8, "train/samples": 4})
    assert numbers.since_last()["qreward/blame_s/judge/queue"] == 2.0
    numbers.answer = ("start", {"val/samples": 8, "train/samples": 8})
    numbers.waited = None
    assert not any("blame_s" in name for name in numbers.since_last())
    assert numbers.asked == ("waited", "start", 3)


def test_an_actor_that_was_started_anew_counts_from_zero_and_one_that_is_silent_gives_nothing():
    numbers = Counts()
    numbers.answer = ("first", {"train/samples": 32, "train/failed": 8})
    numbers.since_last()
    numbers.answer = None
    assert numbers.since_last() == {}
    numbers.answer = ("second", {"train/samples": 4, "train/failed": 1})
    assert numbers.since_last()["qreward/failed_rate"] == 0.25
    assert numbers.since_last() == {}
    numbers.answer = ("third", {})
    assert numbers.may_have_imputed(), "what the lost one knew is not known any more"


@pytest.mark.parametrize("infos", [[{"index": 1}, None, {"index": 3}], None])
def test_rows_with_which_verl_fills_up_a_batch_are_marked(make_data, infos):
    from verl.protocol import pad_dataproto_to_divisor

    data = make_data(["a", "b", "c"], columns={"extra_info": infos} if infos else {})
    if infos is None:
        del data.non_tensor_batch["extra_info"]
    padded, count = trainer_hooks._mark_padding(pad_dataproto_to_divisor)(data, 8)
    assert (len(padded), count) == (8, 5)
    assert [is_padding(padded[row]) for row in range(8)] == [False] * 3 + [True] * 5
    if infos:
        assert padded.non_tensor_batch["extra_info"].tolist()[:4] == [*infos, {"index": 1, PADDING: True}]
        assert data.non_tensor_batch["extra_info"].tolist() == infos
    same, count = trainer_hooks._mark_padding(pad_dataproto_to_divisor)(data, 3)
    assert (same is data, count) == (True, 0)


def test_rows_of_validation_are_marked_and_no_other_column_is_touched():
    from verl.utils.dataset.rl_dataset import collate_fn

    marked = pickle.loads(pickle.dumps(trainer_hooks.MarkedRows(collate_fn)))
    rows = [{"data_source": "a", "extra_info": {"index": 1}}, {"data_source": "b", "extra_info": {"index": 2}}]
    columns = marked(rows)
    assert columns["extra_info"].tolist() == [{"index": 1, VALIDATION: True}, {"index": 2, VALIDATION: True}]
    assert columns["data_source"].tolist() == ["a", "b"]
    assert rows[0]["extra_info"] == {"index": 1}
    assert marked([{"data_source": "a"}])["extra_info"].tolist() == [{VALIDATION: True}]


def test_a_validation_marks_its_rows_once():
    class Trainer:
        val_dataloader = SimpleNamespace(collate_fn=lambda rows: {"extra_info": rows})

        @trainer_hooks._mark_validation
        def _validate(self, merged=False):
            return self.val_dataloader.collate_fn([{}]), merged

    made = Trainer()
    made._validate()
    columns, merged = made._validate(merged=True)
    assert columns["extra_info"].tolist() == [{VALIDATION: True}]
    assert merged


@pytest.mark.parametrize("which", ["legacy", "v1"])
def test_failed_samples_are_in_no_mean_of_validation_and_are_counted(which, monkeypatch):
    infos = {
        "reward": [1.0, 0.0, 0.5],
        "acc": [1.0, math.nan, 0.0],
        "undefined": [math.nan] * 3,
        "qreward/score/style": [0.5, math.nan, 0.25],
        "qreward/latency_s": [1.0, 3.0, 2.0],
        "qreward/failed": [0.0, 1.0, 0.0],
        MISSING: [0.0, 1.0, 0.0],
    }
    kept = {name: list(values) for name, values in infos.items()}
    if which == "legacy":
        import numpy as np
        from verl.trainer.ppo.ray_trainer import RayPPOTrainer as Trainer

        turns, more = [np.array([2, 2, 2])], {}
    else:
        from verl.trainer.ppo.v1.trainer_base import PPOTrainer as Trainer

        turns, more = [2, 2, 2], {}
        if "expected_acc_counts" in inspect.signature(Trainer._val_metrics_update).parameters:  # since 0.9.1
            more["expected_acc_counts"] = {("math", f"u{number}"): 1 for number in range(3)}
    home = sys.modules[Trainer.__module__]
    process = inspect.unwrap(home.process_validation_metrics)
    monkeypatch.setattr(home, "process_validation_metrics", trainer_hooks._of_present_rows(process))
    metrics = Trainer._val_metrics_update(None, ["math"] * 3, ["u0", "u1", "u2"], infos, turns, **more)
    assert metrics["val-aux/math/reward/mean@1"] == 0.75
    assert metrics["val-core/math/acc/mean@1"] == 0.5
    assert metrics["val-aux/math/qreward/score/style/mean@1"] == 0.375
    assert metrics["val-aux/math/qreward/failed/mean@1"] == pytest.approx(1 / 3)
    assert metrics["val-aux/math/qreward/latency_s/mean@1"] == 2.0
    assert not any("undefined" in name for name in metrics)
    assert infos.keys() == kept.keys()


def test_a_queue_that_cannot_be_read_leaves_the_advantages_as_they_are(monkeypatch, caplog):
    warn_once.cache_clear()
    monkeypatch.setitem(sys.modules, "transfer_queue", SimpleNamespace())
    assert trainer_hooks._in_queue(["a"], IMPUTED, "train", "so") == []
    assert trainer_hooks._in_queue(["a"], IMPUTED, "train", "so") == []
    assert caplog.text.count("cannot be read") == 1


@pytest.fixture
def tracking(monkeypatch):
    """verl's tracker, wrapped anew, that writes to a list."""
    from verl.utils import tracking

    class Tracking:
        def __init__(self, project_name, experiment_name, default_backend="console", config=None):
            self.lines = []

        def log(self, data, step, backend=None):
            self.lines.append((step, data))

    monkeypatch.setattr(tracking, "Tracking", Tracking)
    trainer_hooks.install()
    trainer_hooks.install()
    return Tracking


def test_a_tracker_gets_the_counts_of_the_barrier_in_a_run_of_ours_only(tracking, compose, monkeypatch):
    from omegaconf import OmegaConf

    numbers = Counts()
    attached = []
    monkeypatch.setattr(trainer_hooks, "attach", lambda: attached.append(1) or numbers)

    def lines(*overrides):
        logger = tracking("p", "e", config=OmegaConf.to_container(compose(*overrides)))
        logger.log({"loss": 1.0}, 3)
        return logger.lines

    numbers.answer = ("start", {"train/samples": 4, "train/failed": 1})
    assert lines("reward.reward_manager.name=naive") == [(3, {"loss": 1.0})]
    assert attached == []
    ((step, data),) = lines("reward.reward_manager.name=qreward")
    assert (step, data["loss"], data["qreward/failed_rate"]) == (3, 1.0, 0.25)
    assert attached == [1]
    assert tracking("p", "e").lines == []


def test_a_trainer_is_wrapped_once_with_the_classes_made_of_it(monkeypatch):
    class Base:
        def _validate(self):
            return "base"

    class Derived(Base):
        def _validate(self):
            return super()._validate()

    def compute_advantage(data):
        return data

    def process(sources, uids, infos):
        return dict.fromkeys(sources, infos)

    module = SimpleNamespace(
        RayPPOTrainer=Base, compute_advantage=compute_advantage, process_validation_metrics=process
    )
    monkeypatch.setitem(sys.modules, trainer_hooks.LEGACY_MODULE, module)
    monkeypatch.setitem(sys.modules, trainer_hooks.V1_MODULE, None)
    for _ in range(2):
        trainer_hooks._wrap_trainers(Counts())
    assert Base._validate.__wrapped__.__name__ == "_validate"
    assert not hasattr(Base._validate.__wrapped__, "__wrapped__")
    assert module.compute_advantage.__wrapped__ is compute_advantage
    assert Derived._validate.__wrapped__.__qualname__.endswith("Derived._validate")
    infos = {"reward": [1.0], MISSING: [1.0]}
    assert module.process_validation_metrics(["s"], ["u"], infos) == {"s": {MISSING: [1.0]}}
    assert module.process_validation_metrics.__wrapped__ is process


def test_a_trainer_that_validates_in_another_way_gets_no_marks_and_it_is_said(monkeypatch, caplog):
    class Other:
        def _validate(self):
            return "other"

    module = SimpleNamespace(RayPPOTrainer=Other)
    monkeypatch.setitem(sys.modules, trainer_hooks.LEGACY_MODULE, module)
    monkeypatch.setitem(sys.modules, trainer_hooks.V1_MODULE, None)
    trainer_hooks._wrap_trainers(Counts())
    assert not hasattr(Other._validate, "__wrapped__")
    assert "process_validation_metrics" in caplog.text
