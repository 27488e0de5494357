"""What calls of an accelerated function have of their own (keys, context, hedges) and share, in virtual time."""

from __future__ import annotations

import asyncio
import contextvars

import pytest

from qreward_plugins import CircuitOpen, Throttled, accelerate
from qreward_plugins.acceleration import calls
from qreward_plugins.simulation import run


def now() -> float:
    return asyncio.get_running_loop().time()


def test_a_key_is_not_forgotten_while_it_is_paused_or_its_circuit_is_open(monkeypatch):
    monkeypatch.setattr(calls, "IDLE_S", 1.0)
    starts = []

    @accelerate(key=lambda key: key, breaker=1, recovery_s=30)
    async def grade(key):
        starts.append((key, now()))
        if key == "throttled" and len(starts) == 1:
            raise Throttled("later", retry_after_s=50)
        if key == "failing":
            raise ValueError

    async def main():
        with pytest.raises(Throttled):
            await grade("throttled")
        await asyncio.sleep(5)
        await grade("other")
        with pytest.raises(CircuitOpen):
            await grade("throttled")
        with pytest.raises(ValueError):  # noqa: PT011
            await grade("failing")
        await asyncio.sleep(5)
        await grade("other")
        with pytest.raises(CircuitOpen):
            await grade("failing")

    run(main())


def test_a_call_never_sees_the_context_variables_of_another_caller():
    variable = contextvars.ContextVar("variable", default="none")
    seen = {}

    @accelerate(retries=1, interval_s=1)
    async def grade(name):
        seen.setdefault(name, []).append(variable.get())
        if len(seen[name]) == 1:
            raise ValueError

    async def caller(name):
        if name == "secret":
            variable.set(name)
        await grade(name)

    async def main():
        await asyncio.gather(*(caller(name) for name in ("secret", "plain", "other")))

    run(main())
    assert seen == {"secret": ["secret"] * 2, "plain": ["none"] * 2, "other": ["none"] * 2}


