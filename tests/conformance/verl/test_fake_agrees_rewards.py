"""What the stand-in makes of scores before advantages are computed, against verl's own functions: to the last bit, but
where an exponential is taken.
"""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest
from omegaconf import OmegaConf

pytest.importorskip("verl", reason="verl is not installed (pip install 'qreward-plugins[demo]')")
torch = pytest.importorskip("torch")

from qreward_plugins.testing.verl import shaping  # noqa: E402
from qreward_plugins.testing.verl.protocol import TensorColumns, VerlDataProto  # noqa: E402
from qreward_plugins.testing.verl.rollout_correction import correct_rollout  # noqa: E402

from .agreement import VERLS_WARNINGS, both, same  # noqa: E402
from .test_fake_agrees import a_batch  # noqa: E402

pytestmark = VERLS_WARNINGS

WITH_EXPONENTIAL = {"k3", "low_var_kl", "k3+"}


def as_real(tensors):
    from tensordict import TensorDict
    from verl import DataProto

    batch = {name: torch.tensor(np.asarray(values)) for name, values in tensors.items()}
    return DataProto(batch=TensorDict(batch, batch_size=len(tensors["response_mask"])))


@pytest.mark.parametrize("control", ["fixed", "adaptive"])
@pytest.mark.parametrize("kind", ["kl", "k1", "abs", "mse", "k2", "k2+", "k1+", "k3", "low_var_kl", "k3+", "full", "?"])
def test_the_kl_penalty(kind, control):
    from verl.trainer.ppo.core_algos import get_kl_controller
    from verl.trainer.ppo.ray_trainer import apply_kl_penalty

    rng = np.random.default_rng(23)
    config = OmegaConf.create({"type": control, "kl_coef": 0.03, "horizon": 100, "target_kl": 0.1})
    controls = get_kl_controller(config), shaping.get_kl_controller(config)
    for trial in range(12):
        scores, mask, _ = a_batch(rng, groups=True)
        if trial == 5:
            mask[0] = 0
        tensors = {"token_level_scores": scores, "response_mask": mask}
        for name in ("old_log_probs", "ref_log_prob"):
            tensors[name] = (rng.normal(size=mask.shape) * (30 if trial == 7 else 1)).astype(np.float32)
        data = VerlDataProto(TensorColumns(tensors))
        one, other = both(
            lambda tensors=tensors: apply_kl_penalty(as_real(tensors), controls[0], kind),
            lambda data=data: shaping.apply_kl_penalty(data, controls[1], kind),
        )
        if isinstance(one, str):
            assert kind in ("full", "?")
            assert other == one
            return
        real, fake = (each[0].batch["token_level_rewards"] for each in (one, other))
        if kind in WITH_EXPONENTIAL:
            np.testing.assert_allclose(fake, real.numpy(), rtol=1e-6, atol=1e-6)
            assert other[1] == pytest.approx(one[1], rel=1e-6)
        else:
            assert same(real, fake), trial
            assert fake.dtype == np.float32
            assert other[1] == one[1]


@pytest.mark.parametrize("changed", [{"type": "wild"}, {"type": "adaptive", "horizon": 0}])
def test_mistakes_in_the_kl_controller(changed):
    from verl.trainer.ppo.core_algos import get_kl_controller

    config = SimpleNamespace(**{"kl_coef": 0.1, "horizon": 10, "target_kl": 0.1, **changed})
    one, other = both(lambda: get_kl_controller(config), lambda: shaping.get_kl_controller(config))
    assert isinstance(one, str)
    assert one == other


CORRECTIONS = [
    {},
    {"rollout_is": "token"},
    {"rollout_is": "token", "rollout_is_threshold": "0.5_1.5", "rollout_is_batch_normalize": True},
    {"rollout_is": "sequence", "rollout_is_threshold": 3, "rollout_is_batch_normalize": True},
    {"rollout_is": "sequence", "rollout_is_threshold": "0.2_5"},
    {"rollout_rs": "token_k1", "rollout_rs_threshold": "0.6_1.4"},
    {"rollout_rs": "token_k2,token_k3", "rollout_rs_threshold": "0.2, 0.3"},
    {"rollout_rs": "seq_sum_k1,seq_mean_k2,seq_max_k3", "rollout_rs_threshold": "2,0.2,1.5"},
    {"rollout_rs": "seq_mean_k1", "rollout_rs_threshold": 1.3, "rollout_is": "token"},
    {"rollout_rs": "seq_sum_k2,seq_sum_k3,seq_mean_k3,seq_max_k2", "rollout_rs_threshold": 1.0},
    {"rollout_is": "wild"},
    {"rollout_is": "token", "rollout_is_threshold": True},
    {"rollout_is": "token", "rollout_is_threshold": ""},
    {"rollout_is": "token", "rollout_is_threshold": "a_b"},
    {"rollout_is": "token", "rollout_is_threshold": "3_2"},
    {"rollout_is": "token", "rollout_is_threshold": "-1_2"},
    {"rollout_is": "token", "rollout_is_threshold": -1.0},
    {"rollout_is": "token", "rollout_is_threshold": [1]},
    {"rollout_rs": "token_k1"},
    {"rollout_rs": ",", "rollout_rs_threshold": 1.0},
    {"rollout_rs": "seq_max_k1", "rollout_rs_threshold": 1.0},
    {"rollout_rs": "token_k2", "rollout_rs_threshold": "0.1_0.2"},
    {"rollout_rs": "token_k2", "rollout_rs_threshold": "x"},
    {"rollout_rs": "token_k2", "rollout_rs_threshold": 0},
    {"rollout_rs": "token_k1", "rollout_rs_threshold": 0},
    {"rollout_rs": "token_k1", "rollout_rs_threshold": "x"},
    {"rollout_rs": "token_k1", "rollout_rs_threshold": "x_2"},
    {"rollout_rs": "token_k1", "rollout_rs_threshold": "2_1"},
    {"rollout_rs": "token_k1", "rollout_rs_threshold": "-2_1"},
    {"rollout_rs": "token_k1,token_k2", "rollout_rs_threshold": "1,2,3"},
]


@pytest.mark.parametrize("given", CORRECTIONS, ids=str)
def test_the_rollout_correction(given):
    from verl.trainer.ppo.rollout_corr_helper import compute_rollout_correction_and_add_to_batch

    rng = np.random.default_rng(29)
    for trial in range(8):
        _, mask, _ = a_batch(rng, groups=True)
        if trial == 5:
            mask[0] = 0
        if trial == 6:
            mask[:] = 0
        tensors = {"response_mask": mask}
        for name in ("old_log_probs", "rollout_log_probs"):
            tensors[name] = (-np.abs(rng.normal(size=mask.shape)) * 0.4).astype(np.float32)
        data = VerlDataProto(TensorColumns({name: values.copy() for name, values in tensors.items()}))
        one, other = both(
            lambda tensors=tensors: compute_rollout_correction_and_add_to_batch(as_real(tensors), given),
            lambda data=data: correct_rollout(data, given),
        )
        if isinstance(one, str):
            if given.get("rollout_is") == "wild":
                assert other.split(" Must")[0] == one.split(" Must")[0]
            else:
                assert other == one
            continue
        real, told = one
        assert not isinstance(other, str), other
        assert same(real.batch["response_mask"], data.batch["response_mask"])
        assert str(real.batch["response_mask"].dtype) == f"torch.{data.batch['response_mask'].dtype}"
        assert ("rollout_is_weights" in real.batch) == ("rollout_is_weights" in data.batch)
        if "rollout_is_weights" in data.batch:
            real_weights = real.batch["rollout_is_weights"].numpy()
            np.testing.assert_allclose(data.batch["rollout_is_weights"], real_weights, rtol=1e-6)
        assert set(other) == set(told)
        assert other == pytest.approx(told, rel=2e-5, abs=1e-6, nan_ok=True)
