"""Every fault that the judge server knows, met by a real source over a real connection."""

from __future__ import annotations

import asyncio
from contextlib import suppress
from typing import Any

import pytest

from qreward_plugins.errors import InvalidReply, PermanentError, QRewardError, SourceUnusable, Throttled, TransientError
from qreward_plugins.sources import Reply
from qreward_plugins.testing import FaultKind, JudgeServer

pytestmark = pytest.mark.anyio
PATIENCE_S = 20.0

CLASSES: dict[type, set[str]] = {
    PermanentError: {"error_400", "error_413", "error_422"},
    SourceUnusable: {"error_401", "error_403", "error_404", "redirect", "redirect_loop"},
    Throttled: {
        "error_429",
        "error_429_seconds",
        "error_429_date",
        "error_429_huge",
        "error_429_negative",
        "error_429_reset",
        "error_503_seconds",
    },
    InvalidReply: {"refusal"},
    # What is left of the "verdict" stage is a proper reply; its text is the judge's to refuse.
    Reply: {"close_after", "wrong_model", "slow_headers", "slow_body"}
    | {kind.value for kind in FaultKind if kind.stage == "verdict" and kind.value not in ("refusal", "null_content")}
    # A reply that is not streamed has no faults of streams (`test_streamed`), and one to one question none of lists
    # (`test_reward_model_faults`).
    | {kind.value for kind in FaultKind if kind.stage in ("stream", "list")},
}
# Withheld answers have no text in Anthropic's messages: both kinds are one stop_reason.
OF_DIALECT: dict[str, dict[str, type]] = {"anthropic": {"content_filter": InvalidReply}}
DIALECTS = ("openai", "openai_reasoning", "responses", "anthropic", "gemini")
CLOSING = ("close_after", "slow_headers", "slow_body", "short_length")
PAUSES_S = {"error_429_huge": 300.0, "error_429_negative": None, "error_429": None}


def expected(kind: FaultKind, dialect: str) -> type:
    of_dialect = OF_DIALECT.get(dialect, {}).get(kind.value)
    if of_dialect is not None:
        return of_dialect
    found = [outcome for outcome, names in CLASSES.items() if kind.value in names]
    return found[0] if found else TransientError


@pytest.mark.parametrize("dialect", DIALECTS)
async def test_every_fault_has_its_class(
    dialect: str, open_source: Any, request_of: Any, key: str, next_fault: Any
) -> None:
    with JudgeServer(lambda call: 0.5, faults=next_fault.faults, api_key=key) as server:
        source = open_source(server.base_url, dialect=dialect)
        for kind in next_fault.each(kind for kind in FaultKind if kind is not FaultKind.HANG):
            sent: list[int] = []
            try:
                outcome: Reply | QRewardError = await asyncio.wait_for(
                    source.send(request_of(), on_sent=lambda sent=sent: sent.append(1)), PATIENCE_S
                )
            except QRewardError as error:
                outcome = error
            assert type(outcome) is expected(kind, dialect), (kind, outcome)
            assert sent == [1], kind
            assert key not in str(outcome)
            if isinstance(outcome, Throttled):
                pause_s = outcome.retry_after_s
                assert pause_s == PAUSES_S[kind.value] if kind.value in PAUSES_S else 0 < (pause_s or 0) <= 300, kind
            if kind.value in CLOSING:
                # The next request may still be written into the connection that is going away; it is not sent twice
                # unseen.
                with suppress(TransientError):
                    await asyncio.wait_for(source.send(request_of(), on_sent=lambda: None), PATIENCE_S)
            assert (await asyncio.wait_for(source.send(request_of(), on_sent=lambda: None), PATIENCE_S)).text, kind
        await source.aclose()
