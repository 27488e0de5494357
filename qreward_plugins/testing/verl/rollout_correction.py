"""verl's rollout correction (trainer/ppo/rollout_corr_helper.py): weights and masks where the actor's probabilities are
not those that the inference engine sampled with.

It changes which tokens train, and so the advantages of whitened estimators; rewards it leaves alone. Numbers are
float32; an exponential may be one bit off torch's.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np

from .float_sums import masked_mean32, masked_means, mean32, std32, sum32
from .protocol import VerlDataProto

F = np.float32
_BOUND = F(20)
_TINY = F(1e-8)
_TOKEN_OPTIONS = frozenset({"token_k1", "token_k2", "token_k3"})
_OPTIONS = _TOKEN_OPTIONS | {f"seq_{how}_k{kind}" for how in ("sum", "mean", "max") for kind in (1, 2, 3)}
_OPTIONS -= {"seq_max_k1"}


def correct_rollout(data: VerlDataProto, config: Any) -> dict[str, float]:
    """Mask what `rollout_rs` rejects, add `rollout_is_weights`, and return the metrics. Raises `ValueError` and
    `TypeError` for thresholds that verl refuses, and where no token trains.
    """
    batch = data.batch
    mask = np.asarray(batch["response_mask"])
    old, rollout = (np.asarray(batch[name], dtype=F) for name in ("old_log_probs", "rollout_log_probs"))
    _check_mask(mask)
    ratio = old - rollout
    metrics: dict[str, Any] = {}
    level, threshold = config.get("rollout_is", None), config.get("rollout_is_threshold", 2.0)
    if level is not None and threshold is not None:
        normalize = bool(config.get("rollout_is_batch_normalize", False))
        batch["rollout_is_weights"] = _weights(ratio, mask, level, threshold, metrics, normalize=normalize)
    options = config.get("rollout_rs", None)
    if options is not None:
        batch["response_mask"] = _rejected(ratio, mask, options, config.get("rollout_rs_threshold", None), metrics)
    metrics |= _off_policy(old, rollout, mask)
    return {f"rollout_corr/{name}": float(value) for name, value in metrics.items()}


def _weights(ratio: Any, mask: Any, level: str, threshold: Any, metrics: dict[str, Any], *, normalize: bool) -> Any:
    if level not in ("token", "sequence"):
        raise ValueError(f"Invalid rollout_is: {level}. Must be one of {{'token', 'sequence'}}.")
    upper, lower = _is_threshold(threshold)
    logs = ratio if level == "token" else _sums(ratio, mask)[:, None]
    raw = np.broadcast_to(_exp(np.clip(logs, -_BOUND, _BOUND)), ratio.shape) * mask.astype(F)
    weights = np.minimum(raw, F(upper)) if lower is None else np.where((raw >= lower) & (raw <= upper), raw, F(0))
    metrics |= _weight_metrics(weights, raw, logs, mask, level, upper, 1.0 / upper if lower is None else lower)
    if lower is not None:
        metrics["rollout_is_oob_ratio"] = masked_mean32((raw < lower) | (raw > upper), mask)
    if not normalize:
        return weights
    if level == "token":
        mean = masked_mean32(weights, mask)
    else:
        there = (mask.sum(axis=-1) > 0).astype(F)
        mean = F(sum32(masked_means(weights, mask) * there) / max(F(there.sum()), _TINY))
    metrics["rollout_is_batch_norm_factor"] = mean if mean > 1e-8 else 1.0
    return weights / mean if mean > 1e-8 else weights


def _weight_metrics(
    weights: Any, raw: Any, logs: Any, mask: Any, level: str, upper: float, lower: float
) -> dict[str, Any]:
    _check_mask(mask)
    there = mask.astype(bool)
    metrics: dict[str, Any] = {"rollout_is_mean": masked_mean32(weights, mask)}
    if level == "sequence":
        metrics["rollout_is_max"] = _exp(np.minimum(logs.max(), _BOUND))
        metrics["rollout_is_min"] = _exp(logs.min())
        metrics["rollout_is_ratio_fraction_high"] = mean32(logs > F(math.log(upper)))
        metrics["rollout_is_ratio_fraction_low"] = mean32(logs < F(math.log(lower)))
    else:
        metrics["rollout_is_ratio_fraction_high"] = masked_mean32(raw > upper, mask)
        metrics["rollout_is_ratio_fraction_low"] = masked_mean32(raw < lower, mask)
        metrics["rollout_is_max"], metrics["rollout_is_min"] = weights[there].max(), weights[there].min()
    bounded = np.clip(weights, F(0), F(upper))
    mean = masked_mean32(bounded, mask)
    metrics["rollout_is_std"] = _masked_std(bounded, mask)
    relative = bounded / F(mean + _TINY)
    metrics["rollout_is_eff_sample_size"] = 1.0 / float(masked_mean32(relative * relative, mask))
    means, raw_means = masked_means(weights, mask), masked_means(raw, mask)
    metrics |= _of_sequences("rollout_is_seq", means)
    metrics["rollout_is_seq_max_deviation"] = np.abs(means - F(1)).max()
    metrics["rollout_is_seq_fraction_high"] = mean32(raw_means > upper)
    metrics["rollout_is_seq_fraction_low"] = mean32(raw_means < lower)
    return metrics


def _rejected(ratio: Any, mask: Any, options: Any, threshold: Any, metrics: dict[str, Any]) -> Any:
    if threshold is None:
        raise ValueError(
            "rollout_rs_threshold must be explicitly provided when rollout_rs is enabled. "
            "Set rollout_rs_threshold to the desired threshold value."
        )
    names = [name.strip() for name in options.split(",") if name.strip()]
    if not names:
        raise ValueError("rollout_rs must contain at least one valid option.")
    for name in names:
        if name not in _OPTIONS:
            raise ValueError(f"Invalid rollout_rs option: {name}. Must be one of {sorted(_OPTIONS)}.")
    names = list(dict.fromkeys(names))
    bounds = _rs_thresholds(names, threshold)
    bounded = np.clip(ratio, -_BOUND, _BOUND)
    kinds = {"k1": -bounded, "k2": F(0.5) * (bounded * bounded), "k3": _exp(bounded) - F(1) - bounded}
    there, trained = mask.astype(bool), mask.sum(axis=-1) > 0
    keep = np.ones(mask.shape, dtype=F)
    for name in names:
        lower, upper = bounds[name]
        how, _, kind = name.rpartition("_")
        values = kinds[kind]
        by_row = _by_row(how, values, mask)
        statistic = values if by_row is None else np.broadcast_to(by_row[:, None], mask.shape)
        kept = statistic <= F(upper)
        if lower is not None:
            kept &= statistic >= F(lower)
        keep = keep * kept.astype(F)
        metrics |= _rejection_metrics(name, statistic, by_row, mask, trained, lower, upper)
        whole = (~(~kept & there)).all(axis=-1)
        metrics[f"rollout_rs_{name}_masked_fraction"] = masked_mean32(F(1) - kept.astype(F), mask)
        lost = ((F(1) - whole.astype(F)) * trained).sum(dtype=F)
        metrics[f"rollout_rs_{name}_seq_masked_fraction"] = F(lost / F(trained.sum())) if trained.any() else 0.0
    metrics["rollout_rs_masked_fraction"] = masked_mean32(F(1) - keep, mask)
    metrics["rollout_rs_seq_masked_fraction"] = mean32((~((keep > 0.5) & there) & there).any(axis=-1))
    return (mask * keep).astype(mask.dtype)


def _by_row(how: str, values: Any, mask: Any) -> Any:
    if how == "seq_sum":
        return _sums(values, mask)
    if how == "seq_mean":
        return masked_means(values, mask)
    if how == "seq_max":
        most = np.where(mask.astype(bool), values, F(-np.inf)).max(axis=-1)
        return np.where(np.isneginf(most), F(0), most)
    return None


def _rejection_metrics(
    name: str, statistic: Any, by_row: Any, mask: Any, trained: Any, lower: float | None, upper: float
) -> dict[str, Any]:
    _check_mask(mask)
    there, prefix, least = mask.astype(bool), f"rollout_rs_{name}", lower if lower is not None else 0.0
    rows = (by_row if by_row is not None else masked_means(statistic, mask))[trained]
    of_rows = by_row is not None and bool(len(rows))
    extremes = rows if of_rows else statistic[there]
    metrics: dict[str, Any] = {f"{prefix}_mean": masked_mean32(statistic, mask)}
    metrics |= {f"{prefix}_max": extremes.max(), f"{prefix}_min": extremes.min()}
    high, low = (rows > F(upper), rows < F(least)) if of_rows else (statistic > F(upper), statistic < F(least))
    metrics[f"{prefix}_fraction_high"] = mean32(high) if of_rows else masked_mean32(high, mask)
    metrics[f"{prefix}_fraction_low"] = 0.0
    if lower is not None:
        metrics[f"{prefix}_fraction_low"] = mean32(low) if of_rows else masked_mean32(low, mask)
    metrics[f"{prefix}_std"] = _masked_std(np.clip(statistic, F(least), F(upper)), mask)
    metrics |= _of_sequences(f"{prefix}_seq", rows)
    metrics[f"{prefix}_seq_max_deviation"] = np.abs(rows).max() if len(rows) else 0.0
    metrics[f"{prefix}_seq_fraction_high"] = mean32(rows > F(upper)) if len(rows) else 0.0
    if lower is not None or not len(rows):
        metrics[f"{prefix}_seq_fraction_low"] = mean32(rows < F(least)) if len(rows) else 0.0
    return metrics


def _of_sequences(prefix: str, rows: Any) -> dict[str, Any]:
    if not len(rows):
        return dict.fromkeys((f"{prefix}_{name}" for name in ("mean", "std", "max", "min")), 0.0)
    return {
        f"{prefix}_mean": mean32(rows),
        f"{prefix}_std": std32(rows) if len(rows) > 1 else 0.0,
        f"{prefix}_max": rows.max(),
        f"{prefix}_min": rows.min(),
    }


def _off_policy(old: Any, rollout: Any, mask: Any) -> dict[str, Any]:
    ratio = old - rollout
    train, sampled = masked_means(old, mask), masked_means(rollout, mask)
    difference = sampled - train
    squared = _exp(np.clip(ratio, -_BOUND, _BOUND)) ** 2
    by_row = _exp(F(2) * np.clip(_sums(ratio, mask), -_BOUND, _BOUND))
    return {
        "training_ppl": mean32(_exp(-train)),
        "training_log_ppl": mean32(-train),
        "kl": masked_mean32(rollout - old, mask),
        "k3_kl": masked_mean32(_exp(ratio) - ratio - F(1), mask),
        "rollout_ppl": mean32(_exp(-sampled)),
        "rollout_log_ppl": mean32(-sampled),
        "log_ppl_diff": mean32(difference),
        "log_ppl_abs_diff": mean32(np.abs(difference)),
        "log_ppl_diff_max": difference.max(),
        "log_ppl_diff_min": difference.min(),
        "ppl_ratio": mean32(_exp(difference)),
        "chi2_token": F(masked_mean32(squared, mask) - F(1)),
        "chi2_seq": F(mean32(by_row) - F(1)),
    }


def _is_threshold(given: Any) -> tuple[float, float | None]:
    if isinstance(given, bool):
        raise TypeError(
            "rollout_is_threshold must be specified as a float or a string threshold specification, not a boolean."
        )
    if isinstance(given, (int, float)):
        upper, lower = float(given), None
    elif isinstance(given, str):
        if not given.strip():
            raise ValueError("rollout_is_threshold must not be an empty string.")
        try:
            *before, last = given.strip().split("_", 1)
            upper, lower = float(last), float(before[0]) if before else None
        except ValueError as error:
            raise ValueError(f"Invalid rollout_is_threshold '{given}'.") from error
    else:
        raise TypeError("rollout_is_threshold must be a float or a string threshold specification.")
    if upper <= 0:
        raise ValueError(f"rollout_is_threshold upper bound must be positive, got {upper}.")
    if lower is not None and lower <= 0:
        raise ValueError(f"rollout_is_threshold lower bound must be positive, got {lower}.")
    if lower is not None and lower > upper:
        raise ValueError("rollout_is_threshold lower bound must be <= upper bound.")
    return upper, lower


def _rs_thresholds(names: list[str], given: Any) -> Mapping[str, tuple[float | None, float]]:
    """The bounds of each option; those of `k1` are ratios in the configuration, and logarithms here."""
    if not isinstance(given, (str, int, float)):
        raise TypeError("rollout_rs_threshold must be a string or numeric value specifying per-option thresholds.")
    specs = [part.strip() for part in str(given).split(",") if part.strip()]
    if not specs:
        raise ValueError("rollout_rs_threshold must contain at least one threshold value.")
    if len(specs) not in (1, len(names)):
        raise ValueError(
            "rollout_rs_threshold expects either one threshold shared by all options or exactly "
            f"{len(names)} thresholds to match the provided rollout_rs options."
        )
    specs = specs * len(names) if len(specs) == 1 else specs
    return {name: _rs_bounds(name, spec) for name, spec in zip(names, specs, strict=True)}


def _rs_bounds(name: str, spec: str) -> tuple[float | None, float]:
    is_ratio = name.endswith("k1")
    if "_" in spec and not is_ratio:
        raise ValueError(
            f"rollout_rs_threshold for option '{name}' must provide a single upper bound without '_'. "
            f"Received '{spec}'."
        )
    if is_ratio and "_" not in spec:
        spec = f"{1.0 / float(spec)}_{spec}"
    lower_text, upper_text = spec.split("_", 1) if is_ratio else (spec, spec)
    try:
        lower, upper = float(lower_text), float(upper_text)
    except ValueError as error:
        raise ValueError(f"Invalid numeric threshold '{spec}' for option '{name}'.") from error
    if not is_ratio:
        if upper <= 0:
            raise ValueError(f"Threshold for option '{name}' must be positive, got {spec}.")
        return None, upper
    if lower <= 0 or upper <= 0:
        raise ValueError(f"Thresholds for option '{name}' must be positive, got {spec}.")
    if lower > upper:
        raise ValueError(f"Thresholds for option '{name}' must be lower <= upper, got {spec}.")
    return math.log(lower), math.log(upper)


def _check_mask(mask: Any) -> None:
    if not mask.any():
        raise ValueError("response_mask must contain at least one valid token (1).")


def _sums(values: Any, mask: Any) -> Any:
    chosen = np.where(mask.astype(bool), values, F(0)).astype(F) * mask.astype(F)
    return np.array([sum32(row) for row in chosen], dtype=F)


def _masked_std(values: Any, mask: Any) -> Any:
    if mask.sum() <= 1:
        return 0.0
    mean = masked_mean32(values, mask)
    return np.sqrt(max(F(masked_mean32(values * values, mask) - F(mean * mean)), F(0)))


def _exp(values: Any) -> Any:
    with np.errstate(over="ignore"):
        return np.exp(np.asarray(values, dtype=np.float64)).astype(F)


__all__ = ["correct_rollout"]
