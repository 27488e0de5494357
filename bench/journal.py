"""What the journal costs: processor time and bytes of a scored sample, by whose texts it keeps.

All variants score the same samples at the same judge server, in a process of its own, and take turns, so that a busy
machine slows all alike. What counts is the median over the rounds of `time.process_time` by sample, the writing thread
included: a round ends when the journal is closed.

    python bench/journal.py [--samples N] [--rounds R]
"""

from __future__ import annotations

import asyncio
import gc
import statistics
import sys
import tempfile
import time
from functools import partial
from pathlib import Path
from typing import Any

import common
from overhead import make_samples
from rich.console import Console

from qreward_plugins import RewardEngine, Sample, Scored
from qreward_plugins.testing import JudgeServerProcess

VARIANTS = ("no journal", "none", "interesting", "all")
"""Without a journal, and the values of `engine.journal.keep`."""


async def measure(url: str, samples: list[Sample], variant: str, path: Path) -> tuple[float, float]:
    """Seconds of processor time and bytes of the file for each sample."""
    journal = {} if variant == "no journal" else {"journal": {"path": str(path), "keep": variant, "reuse": False}}
    source = {"kind": "openai", "base_url": url, "model": "judge", "limits": {"concurrency": 128}}
    tree: dict[str, Any] = {"sources": {"judge": source}, "judges": {"quality": {"kind": "llm"}}, "engine": journal}
    async with RewardEngine(tree) as engine:
        await engine.score_all(samples[:64])
        gc.collect()
        started = time.process_time()
        outcomes = await engine.score_all(samples)
        assert all(isinstance(outcome, Scored) for outcome in outcomes)
    spent = time.process_time() - started
    size = sum(each.stat().st_size for each in path.parent.glob(f"{path.name}*"))
    return spent / len(samples), size / (len(samples) + 64)


def main() -> int:
    """Run the bench."""
    parser = common.parser(__doc__)
    parser.add_argument("--samples", type=int, default=2000)
    parser.add_argument("--rounds", type=int, default=7)
    options = parser.parse_args()
    samples, console = make_samples(options.samples), Console()
    with JudgeServerProcess() as server:

        def one(variant: str) -> tuple[float, float]:
            with tempfile.TemporaryDirectory() as folder:
                return asyncio.run(measure(server.base_url, samples, variant, Path(folder) / "journal.sqlite"))

        measures = {variant: partial(one, variant) for variant in VARIANTS}
        found = common.turns(options.rounds, measures, console)
    table = common.table("keep", "us of CPU a sample", "beside `none`", "bytes a sample")
    base = statistics.median(spent for spent, _ in found["none"])
    for variant, rounds in found.items():
        spent, size = (statistics.median(each[place] for each in rounds) for place in (0, 1))
        table.add_row(variant, f"{1e6 * spent:.0f}", f"{spent / base:.2f}x", f"{size:.0f}")
    console.print(table)
    common.write(options.json, found)
    return 0


if __name__ == "__main__":
    sys.exit(main())
