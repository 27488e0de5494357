"""What a source has learned about its limits, in words."""

from __future__ import annotations

import pytest

from qreward_plugins.quotas.quota import QuotaUse


@pytest.mark.parametrize(
    ("per_minute", "said"),
    [
        (0.4, "really about 0.4 requests a minute"),
        (1.0, "really about 1 request a minute"),
        (1480.2, "really about 1,480 requests a minute"),
    ],
)
def test_a_learned_limit_is_described_in_words(per_minute: float, said: str) -> None:
    use = QuotaUse(0, 1, None, None, False, per_minute, None, None, "throttled", 1)
    assert use.learned == said
