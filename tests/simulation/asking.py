"""A request to a simulated server at a given time, and what became of it."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass

from qreward_plugins.errors import Throttled, TransientError
from qreward_plugins.simulation import SimulatedServer

GIVEN_UP_S = 500.0


@dataclass
class Ask:
    """One request: of which sample, when, how much work, how many tokens, and when it is cancelled."""

    at_s: float = 0.0
    work: float = 1.0
    tokens: int = 0
    sample: str = ""
    cancel_after_s: float = GIVEN_UP_S


@dataclass
class Answer:
    """What became of it: `ok`, `nonsense`, `throttled`, `error`, `broken`, `hung` or `cancelled`, and when."""

    what: str
    at_s: float
    retry_after_s: float | None = None
    announced: dict | None = None


async def send(server: SimulatedServer, ask: Ask, number: int = 0) -> Answer:
    loop = asyncio.get_running_loop()
    await asyncio.sleep(ask.at_s - loop.time())
    prompt = ask.tokens // 2
    serving = server.serve(ask.sample or str(number), ask.work, prompt, ask.tokens - prompt)
    try:
        served = await asyncio.wait_for(serving, ask.cancel_after_s)
    except Throttled as error:
        return Answer("throttled", loop.time(), error.retry_after_s)
    except TransientError as error:
        return Answer("broken" if error.status is None else "error", loop.time())
    except asyncio.TimeoutError:
        return Answer("hung" if ask.cancel_after_s == GIVEN_UP_S else "cancelled", loop.time())
    return Answer("ok" if served.valid else "nonsense", loop.time(), announced=dict(served.announced))
