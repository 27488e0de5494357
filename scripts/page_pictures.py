"""Makes the pictures of `qreward ui` in docs/: a run that is invented, opened in a headless Chromium.

    python scripts/page_pictures.py

The run is the same each time. Chromium is `chromium` or `google-chrome` on the path.
"""

from __future__ import annotations

import asyncio
import json
import os
import random
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

from aiohttp import web

from qreward_plugins.journal import Journal, Trained, TrainingLog
from qreward_plugins.journal.history import PastAttempt
from qreward_plugins.samples import Cause, Failed, Outcome, RawScore, Sample, Scored, Verdict
from qreward_plugins.samples.spent import Spent, Usage
from qreward_plugins.sources.base import Reply, Request
from qreward_plugins.ui.pages import RunPage

DOCS = Path(__file__).parents[1] / "docs"
STEPS, PROMPTS, GROUP = 120, 8, 8
OUTAGE = range(62, 65)
PICTURES = {
    "ui_trend.png": ("/?run=grpo-7b", 1280, 860),
    "ui_step.png": ("/step/119?run=grpo-7b", 1280, 900),
    "ui_sample.png": ("/sample/0/{row}", 1280, 900),
    "ui_compare.png": ("/compare?a=quality+in+grpo-7b&b=strict+in+replayed", 1280, 860),
}


def run() -> Iterator[tuple[Sample, Outcome, tuple[PastAttempt, ...]]]:
    """The samples of a run whose policy learns to add, and whose judge fails for three steps."""
    rng = random.Random(7)
    for step in range(STEPS):
        for prompt in range(PROMPTS):
            a, b = rng.randrange(100, 999), rng.randrange(100, 999)
            for number in range(GROUP):
                right = rng.random() < 0.2 + 0.65 * step / STEPS - 0.03 * prompt
                answer = a + b if right else a + b + rng.choice((-100, -10, 1, 10, 100))
                sample = Sample(
                    [{"role": "user", "content": f"What is {a} + {b}? Think step by step."}],
                    f"{a} + {b}: I add the hundreds, the tens and the ones. The answer is {answer}.",
                    str(a + b),
                    "carrying" if a % 10 + b % 10 > 9 else "addition",
                    f"{step}-{prompt}",
                    step,
                    "train",
                    id=f"{step}-{prompt}-{number}",
                )
                score = float(rng.choice((8, 9, 10, 10)) if right else rng.choice((0, 0, 1, 2, 3, 4)))
                failed = step in OUTAGE and rng.random() < 0.7
                yield (sample, *judged(sample, rng, failed=failed, score=score))


def judged(
    sample: Sample, rng: random.Random, *, failed: bool, score: float
) -> tuple[Outcome, tuple[PastAttempt, ...]]:
    """The outcome of a sample, and its attempts."""
    nonce, took_s = f"{rng.getrandbits(48):012x}", rng.lognormvariate(-0.3, 0.4)
    asked = f"Grade the response.\n<<<response {nonce}>>>\n{sample.response}\n<<<end response {nonce}>>>"
    request = Request(sample, ({"role": "user", "content": asked},), {"temperature": 0.0}, nonce)
    said = "The sum is right." if score > 5 else f"The sum is wrong: it is {sample.ground_truth}."
    verdict = Reply(json.dumps({"id": nonce, "rationale": said, "score": score}))
    usage = Usage(340, 28)
    if failed:
        problem = "source 'hosted' answered 503 (overloaded)"
        attempts = [("hosted", number * 3.0, number * 3.0 + 0.4, "failed", problem, None) for number in range(4)]
        spent = Spent(4, latency_s=10.0)
        outcome: Outcome = Failed(Cause.INFRA, "deadline", problem, judge="quality", source="hosted", spent=spent)
    else:
        attempts = [("hosted", 0.05, took_s, "valid", "", verdict)]
        if rng.random() < 0.03:
            prose = Reply("The response is fine overall, I would give it a ten.")
            problem = "the reply holds no verdict with this call's id"
            answered = ("hosted", 0.65, 0.65 + took_s, "valid", "", verdict)
            attempts = [("local", 0.05, 0.6, "invalid", problem, prose), answered]
        spent = Spent(len(attempts), usage, attempts[-1][2], 0.0004 * len(attempts))
        raw = RawScore(score)
        outcome = Scored(Verdict(score / 10, {}, said, score > 5, "quality", "hosted", "judge", spent=spent, raw=raw))
    return outcome, tuple(
        PastAttempt(source, start, start + 0.02, end, result, False, problem, usage, 0.0004, request, reply)
        for source, start, end, result, problem, reply in attempts
    )


async def write(path: str) -> int:
    """Write the run into a journal; return the row of a sample with two attempts."""
    now, wanted = 0.0, 0
    book = Journal(path, clock=lambda: now, run_id="grpo-7b", keep="all")
    rewards: dict[str, list[tuple[str, float | None]]] = {}
    for row, (sample, outcome, attempts) in enumerate(run(), 1):
        # A step takes a minute and a half, and asks for 15 samples a second.
        now = 1_700_000_000 + 90 * (sample.step or 0) + (row - 1) % (PROMPTS * GROUP) / 15 + attempts[-1].ended_s
        await book.put(None, sample, outcome, attempts)
        rewards.setdefault(str(sample.group_id), []).append((str(sample.id), outcome.reward))
        if len(attempts) == 2 and (outcome.reward or 0.0) < 0.5:
            wanted = row
    await book.aclose()
    log = TrainingLog(path, clock=lambda: 0.0, run_id="grpo-7b")
    for group, members in rewards.items():
        there = [reward for _, reward in members if reward is not None]
        mean = sum(there) / len(there) if there else 0.0
        trained = [(name, mean if reward is None else reward, reward is None) for name, reward in members]
        log.add([Trained(name, group, None, reward, 2 * (reward - mean), masked) for name, reward, masked in trained])
    log.flush()
    return wanted


async def write_again(path: str) -> None:
    """Write what a stricter judge makes of the last steps."""
    rng = random.Random(8)
    book = Journal(path, clock=lambda: 1_800_000_000.0, run_id="replayed", keep="all")
    for sample, outcome, _ in run():
        if (sample.step or 0) >= STEPS - 20 and isinstance(outcome, Scored):
            before = 10 * outcome.reward
            score = before if before > 8 or before < 3 else float(rng.randrange(int(before) // 2, int(before) + 1))
            said = "Right, but the steps are not shown." if score > 5 else outcome.verdict.rationale
            verdict = Verdict(score / 10, {}, said, score > 5, "strict", "hosted", "judge", raw=RawScore(score))
            await book.put(None, sample, Scored(verdict))
    await book.aclose()


async def main() -> int:
    """Write the pictures; return the exit code."""
    browser = shutil.which("chromium") or shutil.which("google-chrome")
    if browser is None:
        print("there is no chromium on the path", file=sys.stderr)
        return 1
    with tempfile.TemporaryDirectory() as folder:
        os.chdir(folder)  # the page shows the path of the journal
        row = await write("verdicts.sqlite")
        await write_again("replayed.sqlite")
        journals = ["verdicts.sqlite", "replayed.sqlite"]
        runner = web.AppRunner(RunPage(journals).application(), shutdown_timeout=0.1)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        url = f"http://127.0.0.1:{runner.addresses[0][1]}"
        for name, (place, width, height) in PICTURES.items():
            command = [browser, "--headless", "--no-sandbox", "--disable-gpu", "--no-first-run", "--hide-scrollbars"]
            command += ["--disable-background-networking", f"--user-data-dir={folder}/{name}", "--timeout=3000"]
            command += [f"--window-size={width},{height}", f"--screenshot={DOCS / name}", url + place.format(row=row)]
            await asyncio.to_thread(subprocess.run, command, check=True, capture_output=True)
        await runner.cleanup()
        os.chdir(DOCS)
    return 0


if __name__ == "__main__":
    sys.exit(asyncio.run(main()))
