"""Two engines in two processes, which know of each other only that there are two, keep one server's limits."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

from qreward_plugins.testing import Faults, JudgeServer, Latency

from ..kit import make_limits, overlap_of

PROCESSES = 2
SAMPLES_EACH = 400


def test_two_processes_share_the_limits_of_one_server(make_config, make_sample):
    theirs, ours = make_limits(requests=301, tokens=120_000, concurrency=25)
    faults = Faults(rates={"error_500": 0.03, "reset": 0.03, "error_422": 0.01})
    program = Path(__file__).with_name("score_part.py")
    samples = [make_sample(number) for number in range(PROCESSES * SAMPLES_EACH)]
    with JudgeServer(limits=theirs, latency=Latency(median_s=0.02, sigma=0.6), faults=faults, seed=5) as server:
        tree = make_config({"a": server.base_url}, limits={"a": ours})
        running = []
        for process in range(PROCESSES):
            part = samples[process::PROCESSES]
            task = {"config": tree, "processes": PROCESSES, "responses": [sample.response for sample in part]}
            started = subprocess.Popen(
                [sys.executable, str(program)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
            )
            started.stdin.write(json.dumps(task))
            started.stdin.close()
            running.append((started, part))
        reports = []
        for started, part in running:
            with started:
                reports.append(json.load(started.stdout))
            assert started.returncode == 0
            missing = 0
            for sample, reward in zip(part, reports[-1]["rewards"], strict=True):
                missing += isinstance(reward, str)
                assert isinstance(reward, str) or reward == overlap_of(sample)
            assert missing < SAMPLES_EACH / 20  # rejected by the only source that there is
        report = server.report()
    assert report.violations_total == 0, report.violations[:5]
    assert report.requests == sum(part["requests"] for part in reports)
    assert report.peak_concurrency <= 2 * (25 // 2)
