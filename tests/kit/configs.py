"""Configurations and samples."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import pytest

from qreward_plugins import ConfigurationError, Sample
from qreward_plugins.testing import ServerLimits

# A server counts over one second, and the engine keeps the same numbers over a somewhat longer window. The engine's own
# margin is for what a network does; a server that gets no processor for half a second, as happens on a busy machine,
# sees requests closer together than they were written.
SERVER_WINDOW_S = 1.0
ENGINE_WINDOW_S = 1.35


def make_config(
    servers: Mapping[str, Any] | Iterable[str] = "a",
    *,
    limits: Mapping[str, Any] | None = None,
    total_s: float = 20,
    source: Mapping[str, Any] | None = None,
    judge: Mapping[str, Any] | None = None,
    engine: Mapping[str, Any] | None = None,
    **top: Any,
) -> dict[str, Any]:
    """The tree of a configuration: one LLM judge over sources.

    `servers`: judge servers or base URLs by name; or the names alone, for sources that are simulated. `limits` are by
    source; `source`, `judge` and `engine` are further keys of each source, of the judge and of the engine.
    """
    urls = servers if isinstance(servers, Mapping) else {name: f"http://{name}.invalid/v1" for name in servers}
    return {
        "sources": {
            name: {
                "kind": "openai",
                "base_url": server if isinstance(server, str) else server.base_url,
                "model": "judge",
                "limits": dict((limits or {}).get(name, {})),
                "timeouts": {"total_s": total_s},
                **(source or {}),
            }
            for name, server in urls.items()
        },
        "judges": {"quality": {"kind": "llm", **(judge or {})}},
        "engine": {"seed": 7, **(engine or {})},
        **top,
    }


def mistakes_of(make: Callable[..., object], *given: Any, **named: Any) -> dict[str, str]:
    """What is wrong with a configuration, by path; `make` must refuse it, with no other error in the report."""
    with pytest.raises(ConfigurationError) as refused:
        make(*given, **named)
    assert refused.value.__cause__ is refused.value.__context__ is None
    return {mistake.path: str(mistake) for mistake in refused.value.mistakes}


def make_limits(requests: int, tokens: int, concurrency: int) -> tuple[ServerLimits, dict[str, Any]]:
    """The limits of a strict server, and what the configuration says of them: so much in any second."""
    theirs, ours = (
        {
            "requests_per_minute": requests * 60 / window_s,
            "tokens_per_minute": tokens * 60 / window_s,
            "concurrency": concurrency,
            "window_s": window_s,
        }
        for window_s in (SERVER_WINDOW_S, ENGINE_WINDOW_S)
    )
    return ServerLimits(**theirs), {**ours, "window": "sliding"}


def make_sample(number: int = 0, **fields: Any) -> Sample:
    """Sample `number`, with a question and a response of its own."""
    values = {
        "messages": [{"role": "user", "content": f"What is {number} plus 1?"}],
        "response": f"{number} plus 1 is {number + 1}.",
        "ground_truth": str(number + 1),
        "data_source": "test/add",
        "id": f"sample-{number}",
    }
    return Sample(**{**values, **fields})


def make_samples(count: int, **fields: Any) -> list[Sample]:
    """That many samples."""
    return [make_sample(number, **fields) for number in range(count)]
