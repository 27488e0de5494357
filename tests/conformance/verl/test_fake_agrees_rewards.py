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

from .agreement import both, same  # noqa: E402
from .test_fake_agrees import a_batch  # noqa: E402

pytestmark = pytest.mark.filterwarnings("default")  # verl's own

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
