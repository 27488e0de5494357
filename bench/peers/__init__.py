"""The policies of bench/makespan.py, one module each. A module is imported only when its policy runs.

Every peer is the real code of its project in its best reasonable configuration; only the network is replaced, by
`stage`. If a project cannot be installed, its policy is rebuilt from the source that the module names.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Policy:
    """One row of the bench: `module` of this package has the class `Peer`, made with `variant`."""

    name: str
    title: str
    module: str
    package: str
    """What must be installed, as the package index calls it."""
    imports: str
    """What must be importable for it."""
    variant: str = ""
    starts_at_s: float = 0.0
    """When the measured batch starts; all faults are that much later, and what comes before is a warm-up."""


POLICIES = {
    policy.name: policy
    for policy in (
        Policy("ours", "qreward-plugins", "ours", "qreward-plugins", "qreward_plugins", "cold"),
        Policy(
            "ours-warm", "qreward-plugins, second batch", "ours", "qreward-plugins", "qreward_plugins", "warm", 600.0
        ),
        Policy("litellm", "litellm Router", "litellm_router", "litellm", "litellm"),
        Policy("qreward", "QReward", "qreward_manager", "QReward", "qreward.client"),
        Policy("verl", "verl RateLimitedRewardManager", "verl_limited", "verl", "verl"),
        Policy("slime", "slime remote_rm", "slime_remote", "aiohttp", "aiohttp"),
        Policy("curator", "curator, retries at the end", "curator_online", "aiohttp", "aiohttp"),
        Policy("tenacity", "semaphore + tenacity", "tenacity_retries", "tenacity", "tenacity"),
    )
}

__all__ = ["POLICIES", "Policy"]
