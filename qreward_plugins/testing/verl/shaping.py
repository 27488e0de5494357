"""From scores to what trains: token rewards less the KL penalty, then advantages (ray_trainer.py, core_algos.py)."""

from __future__ import annotations

from typing import Any, TypeAlias

import numpy as np

from .advantages import ESTIMATORS, TOKEN_BASELINES, F, Floats, Rewards, estimate
from .float_sums import masked_means, mean32
from .protocol import VerlDataProto

KL_BOUND = F(20)
K3_BOUND = F(10)


class FixedKLController:
    """A coefficient that stays as it is."""

    def __init__(self, kl_coef: float) -> None:
        self.value = kl_coef

    def update(self, current_kl: float, n_steps: int) -> None:
        """Leave the coefficient as it is."""


class AdaptiveKLController:
    """A coefficient that follows the KL divergence to its target: 20 % off the target moves it most."""

    def __init__(self, init_kl_coef: float, target_kl: float, horizon: int) -> None:
        self.value: Any = init_kl_coef
        self.target, self.horizon = target_kl, horizon

    def update(self, current_kl: float, n_steps: int) -> None:
        """Move the coefficient by the KL divergence of a batch of `n_steps` rows."""
        error = np.clip(current_kl / self.target - 1, -0.2, 0.2)
        self.value *= 1 + error * n_steps / self.horizon


KLController: TypeAlias = "FixedKLController | AdaptiveKLController"


def get_kl_controller(kl_ctrl: Any) -> KLController:
    """The controller of `algorithm.kl_ctrl`. Raises `NotImplementedError` for an unknown type."""
    if kl_ctrl.type == "fixed":
        return FixedKLController(kl_coef=kl_ctrl.kl_coef)
    if kl_ctrl.type == "adaptive":
        assert kl_ctrl.horizon > 0, f"horizon must be larger than 0. Got {kl_ctrl.horizon}"
        return AdaptiveKLController(kl_ctrl.kl_coef, kl_ctrl.target_kl, kl_ctrl.horizon)
    raise NotImplementedError


def kl_estimates(log_prob: Floats, ref_log_prob: Floats, kind: str) -> Any:
    """An estimate of the KL divergence of each token. Raises `NotImplementedError` for an unknown `kind`.

    `k3` may be one bit off: torch and numpy take the exponential differently.
    """
    # The suffix is about gradients, but it is computed with: x - x + y is NaN where x is infinite.
    base = kind.removesuffix("+")
    difference = log_prob - ref_log_prob
    if base in ("kl", "k1"):
        estimates = difference
    elif base == "abs":
        estimates = np.abs(difference)
    elif base in ("mse", "k2"):
        estimates = F(0.5) * (difference * difference)
    elif base in ("low_var_kl", "k3"):
        bounded = np.clip(ref_log_prob - log_prob, -KL_BOUND, KL_BOUND)
        ratio = np.exp(bounded.astype(np.float64)).astype(F)
        estimates = np.clip(ratio - bounded - F(1), -K3_BOUND, K3_BOUND)
    else:
        raise NotImplementedError
    if kind != base and kind not in ("mse", "k2"):
        straight = F(0.5) * (difference * difference)
        estimates = straight - straight + estimates
    return estimates


def apply_kl_penalty(
    data: VerlDataProto, kl_ctrl: KLController, kl_penalty: str = "kl"
) -> tuple[VerlDataProto, dict[str, Any]]:
    """Set `token_level_rewards` to the scores less the penalty, and return the metrics of it. Needs `old_log_probs` and
    `ref_log_prob` of the shape of `token_level_scores`.
    """
    batch = data.batch
    mask = np.asarray(batch["response_mask"])
    old, ref = (np.asarray(batch[name]) for name in ("old_log_probs", "ref_log_prob"))
    kld = kl_estimates(old, ref, kl_penalty) * mask.astype(F)
    beta = kl_ctrl.value
    batch["token_level_rewards"] = np.asarray(batch["token_level_scores"]) - F(beta) * kld
    current = float(mean32(masked_means(kld, mask)))
    kl_ctrl.update(current_kl=current, n_steps=len(data))
    return data, {"actor/reward_kl_penalty": current, "actor/reward_kl_penalty_coeff": beta}


def compute_advantage(
    data: VerlDataProto,
    adv_estimator: Any,
    gamma: float = 1.0,
    lam: float = 1.0,
    num_repeat: int = 1,
    norm_adv_by_std_in_grpo: bool = True,
    config: Any = None,
) -> VerlDataProto:
    """`verl.trainer.ppo.ray_trainer.compute_advantage`."""
    batch = data.batch
    if str(adv_estimator) == "gae" and config is not None and config.get("use_pf_ppo", False):
        raise NotImplementedError(
            "algorithm.use_pf_ppo draws the rows of a batch anew, with torch's random numbers: not played by "
            "FakeVerlTrainer"
        )
    if str(adv_estimator) in TOKEN_BASELINES:
        raise AssertionError(
            "Step-dependent optimal baseline requires sum_pi_squared from actor. Please set "
            "actor.calculate_sum_pi_squared=True in config."
        )
    if str(adv_estimator) not in ESTIMATORS:
        raise ValueError(f"Unknown advantage estimator simply: {adv_estimator}")
    last = None
    if str(adv_estimator) == "gdpo" and "attention_mask" not in batch and config.get("gdpo_reward_keys", None):
        raise KeyError(f'key "prompts" not found in TensorDict with keys {sorted(batch)}')
    if "attention_mask" in batch:
        last = np.asarray(batch["attention_mask"])[:, batch["prompts"].shape[1] :].sum(axis=1) - 1
    advantages, returns = estimate(
        str(adv_estimator),
        Rewards(
            rewards=np.asarray(batch["token_level_rewards"]),
            mask=np.asarray(batch["response_mask"]),
            uids=list(data.non_tensor_batch.get("uid", ())),
            values=np.asarray(batch["values"]) if "values" in batch else None,
            baselines=np.asarray(batch["reward_baselines"]) if "reward_baselines" in batch else None,
            components=data.non_tensor_batch,
            last=last,
            config=config,
        ),
    )
    batch["advantages"], batch["returns"] = advantages.copy(), returns.copy()
    return data


__all__ = ["KLController", "apply_kl_penalty", "compute_advantage", "get_kl_controller", "kl_estimates"]
