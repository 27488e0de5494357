"""`qreward check`: what the configuration says, and what each source answers."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from ..engine import RewardEngine
from ..probe import Probe, probe


async def check_config(path: Path, out: Console) -> int:
    """Validate the file, probe every source, and print a table; 0 when every source gave a valid verdict, else 1."""
    async with RewardEngine(path) as engine:
        config = engine.config
        out.print(
            f"{path}: valid, with {_count(len(config.sources), 'source')}, {_count(len(config.judges), 'judge')} and "
            f"{_count(len(config.routes), 'route')}. Asking every source once:",
            highlight=False,
        )
        table = Table("judge", "source", "model", "latency", "announces", "verdict")
        problems = []
        with out.status("asking ..."):
            async for result in probe(engine):
                table.add_row(*map(escape, _row(result)))
                if result.problem:
                    problems.append(result)
    out.print(table)
    for result in problems:
        out.print(
            f"[red]{escape(result.source)}[/red] ({escape(result.judge)}): {escape(result.problem)}", highlight=False
        )
    return 1 if problems else 0


def _row(result: Probe) -> tuple[str, ...]:
    latency = "-" if result.latency_s is None else f"{result.latency_s:.2f} s"
    verdict = "none" if result.verdict is None else f"{result.verdict.score:.3g}"
    return result.judge, result.source, result.model, latency, _announced(result.announced) or "nothing", verdict


def _announced(limits: Mapping[str, float]) -> str:
    return ", ".join(
        f"{value:g} {name.replace('_', ' ')}" for name, value in sorted(limits.items()) if math.isfinite(value)
    )


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}{'' if number == 1 else 's'}"
