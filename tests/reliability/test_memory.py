"""A stream lets go of samples that fail, or are tried again, as of the others (promise P8), and without the garbage
collector's help.
"""

from __future__ import annotations

import gc
import itertools

from qreward_plugins import Scored, TransientError

from ..kit import Stage, make_sample, scored_text

SAMPLES = 6_000
WINDOW = 64


class Column:
    """A part of a sample that counts how many of it are alive."""

    alive = 0

    def __init__(self):
        Column.alive += 1

    def __del__(self):
        Column.alive -= 1


def test_a_stream_of_samples_that_fail_holds_no_more_than_its_window():
    replies = itertools.count(1)
    stage = Stage(
        {"a": lambda number, request, now: TransientError("failed") if number % 7 == 6 else 0.0},
        answer=lambda request: scored_text(request, 0.5 if next(replies) % 11 else None),
        options={"judge": {"invalid_retries": 1}},
    )
    samples = (make_sample(number, extras={"column": Column()}) for number in range(SAMPLES))

    async def main(engine):
        most, failed, seen = 0, 0, 0
        async for _, outcome in engine.score_stream(samples, window=WINDOW):
            seen += 1
            failed += not isinstance(outcome, Scored)
            most = max(most, Column.alive)
        return seen, most, failed

    gc.collect()
    gc.disable()
    try:
        seen, most, failed = stage.run(main)
        assert Column.alive == 0
    finally:
        gc.enable()
    assert (seen, failed > 0) == (SAMPLES, True)
    # One is with the reader, one between the two, and some that ended are still on the list of attempts to look at,
    # which is cleared when most of it has ended.
    assert WINDOW <= most <= 2 * WINDOW + 2
