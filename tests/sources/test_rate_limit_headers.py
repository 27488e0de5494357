from __future__ import annotations

from datetime import datetime, timedelta, timezone
from email.utils import format_datetime

import pytest
from multidict import CIMultiDict

from qreward_plugins.sources.rate_limit_headers import announced_limits, retry_after_s

DATE = "Wed, 21 Oct 2015 07:28:00 GMT"


@pytest.mark.parametrize(
    ("headers", "pause_s"),
    [
        ({}, None),
        ({"Retry-After": "7"}, 7.0),
        ({"retry-after": " 1.5 "}, 1.5),
        ({"Retry-After": "0"}, 0.0),
        ({"Retry-After": "-5"}, None),
        ({"Retry-After": "soon"}, None),
        ({"Retry-After": "nan"}, None),
        ({"Retry-After": "inf"}, None),
        ({"Retry-After": "1_0"}, None),
        ({"Retry-After": "١"}, None),
        ({"Retry-After": "9" * 60}, 300.0),
        ({"Retry-After": "9" * 5000}, None),
        ({"Retry-After": "94608000"}, 300.0),
        ({"retry-after-ms": "250", "Retry-After": "7"}, 0.25),
        ({"retry-after-ms": "x", "Retry-After": "7"}, 7.0),
        ({"Retry-After": "Wed, 21 Oct 2015 07:28:09 GMT", "Date": DATE}, 9.0),
        ({"Retry-After": "Thu, 22 Oct 2015 07:28:09 GMT", "Date": DATE}, 300.0),
        ({"Retry-After": "Wed, 21 Oct 2015 07:27:00 GMT", "Date": DATE}, None),
        ({"Retry-After": "Wed, 99 Oct 2015 07:28:09 GMT", "Date": DATE}, None),
        ({"x-ratelimit-remaining-requests": "0", "x-ratelimit-reset-requests": "6m0s"}, 300.0),
        ({"x-ratelimit-remaining-requests": "0", "x-ratelimit-reset-requests": "120ms"}, 0.12),
        ({"x-ratelimit-remaining-requests": "3", "x-ratelimit-reset-requests": "9s"}, None),
    ],
)
def test_a_pause_is_read_clamped_or_nothing(headers: dict[str, str], pause_s: float | None) -> None:
    assert retry_after_s(CIMultiDict(headers)) == pytest.approx(pause_s)


def test_a_date_without_a_date_header_is_relative_to_the_wall_clock() -> None:
    later = datetime.now(timezone.utc) + timedelta(seconds=100)
    pause_s = retry_after_s(CIMultiDict({"Retry-After": format_datetime(later, usegmt=True)}))
    assert pause_s is not None
    assert 50 < pause_s <= 100


def test_the_limits_of_every_spelling_are_read() -> None:
    openai = {
        "x-ratelimit-limit-requests": "5000",
        "x-ratelimit-remaining-requests": "4999",
        "x-ratelimit-reset-requests": "12ms",
        "x-ratelimit-limit-tokens": "160000",
        "x-ratelimit-remaining-tokens": "159000",
        "x-ratelimit-reset-tokens": "1m2.5s",
    }
    assert announced_limits(CIMultiDict(openai)) == pytest.approx(
        {
            "requests_per_window": 5000,
            "requests_remaining": 4999,
            "requests_reset_s": 0.012,
            "tokens_per_window": 160000,
            "tokens_remaining": 159000,
            "tokens_reset_s": 62.5,
        }
    )
    anthropic = {
        "Date": DATE,
        "anthropic-ratelimit-requests-limit": "50",
        "anthropic-ratelimit-requests-reset": "2015-10-21T07:28:30Z",
    }
    assert announced_limits(CIMultiDict(anthropic)) == {"requests_per_window": 50.0, "requests_reset_s": 30.0}
    assert announced_limits(CIMultiDict({"RateLimit-Limit": "10", "RateLimit-Reset": "0.5"})) == {
        "requests_per_window": 10.0,
        "requests_reset_s": 0.5,
    }


@pytest.mark.parametrize("value", ["", "-1", "nan", "many", "1e400", "9" * 64, "1700000000", "1h1", "Z", "5 m"])
def test_a_reset_that_makes_no_sense_is_left_out(value: str) -> None:
    assert announced_limits(CIMultiDict({"x-ratelimit-reset-requests": value})) == {}
