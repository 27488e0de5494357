"""What a reward costs by how it is judged: the same samples through one large judge, a cascade, a gate, a gate with
ranks behind it, and a panel, in virtual time.

Prompts have groups of samples, as GRPO draws them. Of each sample it is drawn whether it is right, and how good it is;
half of the groups are all wrong or all right, as in data sets such as DAPO's. A rule tells right from wrong at once.
Judges are simulated: each sees how good a sample is with noise of its own, and the large one sees less noise, takes
longer and costs more. Their limits are those of a small account at a provider.

    python bench/judging.py [--prompts 256] [--group 8] [--seed 0] [--json FILE]

"Agreement" is the mean, over groups with differences, of the rank correlation (Spearman) between rewards and how good
the samples are, where wrong ones are worst. The same seed gives the same numbers, to the last digit.
"""

from __future__ import annotations

import asyncio
import json
import math
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import common
import numpy as np
from rich.console import Console
from rich.table import Table

from qreward_plugins import Outcome, RewardEngine, Sample, Usage
from qreward_plugins.judges.fence import read_fences
from qreward_plugins.simulation import SimulatedSource, run
from qreward_plugins.sources import Reply

RESPONSE_TOKENS = 400
"""Tokens of a response, and of a question with the instructions."""
_FILLING = "so it is " * (RESPONSE_TOKENS * 4 // 9)
VERDICT_TOKENS = 60
FLAT = 0.5
"""Share of the groups whose samples are all right or all wrong."""


@dataclass(frozen=True)
class Model:
    """A simulated judge. Seconds for an answer, US dollars for a million tokens in and out, and its limits."""

    noise: float
    seconds: float
    price: tuple[float, float]
    requests_per_minute: int
    concurrency: int


MODELS = {
    "small": Model(noise=0.25, seconds=1.0, price=(0.05, 0.2), requests_per_minute=3_000, concurrency=64),
    "large": Model(noise=0.08, seconds=4.0, price=(1.0, 5.0), requests_per_minute=600, concurrency=64),
}

_LARGE = {"kind": "llm", "sources": "large", "score_range": [0, 1]}
_SMALL = {"kind": "llm", "sources": "small", "score_range": [0, 1]}
_RULE = {"kind": "llm", "sources": "rule", "score_range": [0, 1]}
_BEHIND = {**_LARGE, "reward_range": [0.5, 1]}

POLICIES: Mapping[str, Mapping[str, Any]] = {
    "judge": {"reward": _LARGE},
    "cascade": {
        "quick": _SMALL,
        "careful": _LARGE,
        "reward": {
            "kind": "cascade",
            "stages": [{"judge": "quick", "decides": {"above": 0.9, "below": 0.1}}, "careful"],
        },
    },
    "gate": {
        "right": _RULE,
        "quality": _BEHIND,
        "reward": {"kind": "gate", "when": "right", "at_least": 1, "then": "quality"},
    },
    "gate, rank": {
        "right": _RULE,
        "quality": _BEHIND,
        "ranked": {"kind": "rank", "judge": "quality"},
        "reward": {"kind": "gate", "when": "right", "at_least": 1, "then": "ranked"},
    },
    "rank": {"quality": _LARGE, "reward": {"kind": "rank", "judge": "quality"}},
    "panel": {
        **{f"member_{number}": _SMALL for number in range(3)},
        "reward": {"kind": "panel", "judges": [f"member_{number}" for number in range(3)], "reduce": "median"},
    },
}


@dataclass(frozen=True)
class Result:
    """What one policy took for all samples."""

    policy: str
    samples: int
    scored: int
    calls: Mapping[str, int]
    """Requests by model."""
    usd: float
    makespan_s: float
    agreement: float
    flat: float
    """Share of the groups whose rewards are all equal, from which a group-based estimator learns nothing."""


def draw(prompts: int, group: int, seed: int) -> list[Sample]:
    """The samples. A response states whether it is right, and how good it is (0 to 1)."""
    rng = random.Random(seed)
    samples = []
    for prompt in range(prompts):
        flat = rng.random() < FLAT
        share = float(rng.random() < 0.5) if flat else rng.uniform(0.2, 0.8)
        for number in range(group):
            right, quality = rng.random() < share, rng.random()
            messages = [{"role": "user", "content": f"Question {prompt}"}]
            response = f"{prompt}/{number} {int(right)} {quality:.6f} {_FILLING}"
            samples.append(Sample(messages, response, group_id=str(prompt), id=f"{prompt}/{number}", step=1))
    return samples


def _is_right(response: str) -> bool:
    return response.split()[1] == "1"


def _worth(response: str) -> float:
    """How good a response is: a wrong one is worth half as much as the worst right one, or less."""
    quality = float(response.split()[2])
    return 0.5 + quality / 2 if _is_right(response) else quality / 4


def _seen(model: str, judge: str, response: str) -> float:
    """The score of a response by a judge, which sees it with noise."""
    noise = random.Random(f"{model} {judge} {response}").gauss(0, MODELS[model].noise)
    return min(max(_worth(response) + noise, 0.0), 1.0)


def _source(name: str) -> SimulatedSource:
    def answer(request: Any) -> Reply:
        _, blocks = read_fences(request.messages[-1]["content"])
        shown = {label: text for label, text in blocks.items() if label.startswith("response")}

        def score(text: str) -> float:
            return float(_is_right(text)) if name == "rule" else _seen(name, request.judge, text)

        listed = {label.removeprefix("response_"): score(text) for label, text in shown.items()}
        said = {"score": score(shown["response"])} if "response" in shown else {"scores": listed}
        tokens = RESPONSE_TOKENS * (1 + len(shown))
        text = json.dumps({"id": request.nonce, "rationale": "so", **said})
        return Reply(text=text, usage=Usage(tokens, VERDICT_TOKENS), finish_reason="stop")

    seconds = 0.001 if name == "rule" else MODELS[name].seconds
    return SimulatedSource(name, behaviour=lambda number, request, now: seconds, answer=answer, local=name == "rule")


def _tree(judges: Mapping[str, Any]) -> dict[str, Any]:
    sources: dict[str, Any] = {}
    for name in ("rule", *MODELS):
        sources[name] = {"kind": "openai", "base_url": f"http://{name}.invalid/v1", "model": name}
        if name in MODELS:
            model = MODELS[name]
            sources[name] |= {
                "price": {"input_per_million": model.price[0], "output_per_million": model.price[1]},
                "limits": {"requests_per_minute": model.requests_per_minute, "concurrency": model.concurrency},
            }
        else:
            sources[name]["limits"] = {"concurrency": 10_000}
    used = {str(judge.get("sources")) for judge in judges.values()}
    return {
        "sources": {name: source for name, source in sources.items() if name in used},
        "judges": dict(judges),
        "routes": {"*": "reward"},
        "engine": {"seed": 0, "deadline_s": 3600},
    }


def judged(policy: str, samples: Sequence[Sample]) -> tuple[Result, list[float]]:
    """Score the samples by a policy. Return what it took, and the rewards."""
    tree = _tree(POLICIES[policy])
    sources = {name: _source(name) for name in tree["sources"]}

    async def main() -> tuple[list[Outcome], float, float]:
        async with RewardEngine(tree, sources=sources) as engine:
            outcomes = await engine.score_all(samples)
            spent = sum(source.cost_usd for source in engine.statistics().sources.values())
            return outcomes, asyncio.get_running_loop().time(), spent

    outcomes, makespan_s, usd = run(main())
    rewards = [math.nan if outcome.reward is None else outcome.reward for outcome in outcomes]
    groups: dict[str, list[int]] = {}
    for place, sample in enumerate(samples):
        groups.setdefault(str(sample.group_id), []).append(place)
    correlations, flat = [], 0
    for places in groups.values():
        given = np.array([rewards[place] for place in places])
        if np.ptp(given) == 0:
            flat += 1
            continue
        worth = np.array([_worth(samples[place].response) for place in places])
        correlations.append(float(np.corrcoef(_ranks(given), _ranks(worth))[0, 1]))
    calls = {name: len(source.arrivals) for name, source in sources.items() if name in MODELS}
    scored = sum(outcome.reward is not None for outcome in outcomes)
    agreement = float(np.mean(correlations))
    return Result(policy, len(samples), scored, calls, usd, makespan_s, agreement, flat / len(groups)), rewards


def _ranks(values: np.ndarray) -> np.ndarray:
    """Ranks from 0, with the mean of the ranks for equal values."""
    _, inverse, counts = np.unique(values, return_inverse=True, return_counts=True)
    ends = np.cumsum(counts)
    return ((ends - counts + ends - 1) / 2)[inverse]


def table_of(results: Sequence[Result]) -> Table:
    """The results as a table."""
    table = common.table("policy", "calls small", "calls large", "dollars", "seconds", "agreement", "flat groups")
    for result in results:
        calls = [f"{result.calls.get(name, 0):,}" for name in MODELS]
        numbers = [f"{result.usd:.2f}", f"{result.makespan_s:.0f}", f"{result.agreement:.2f}", f"{result.flat:.0%}"]
        table.add_row(result.policy, *calls, *numbers)
    return table


def main() -> None:
    """Run all policies, and print what each took."""
    parser = common.parser(__doc__)
    parser.add_argument("--prompts", type=int, default=256)
    parser.add_argument("--group", type=int, default=8, help="samples of a prompt")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    samples = draw(options.prompts, options.group, options.seed)
    results = []
    with Console(stderr=True).status("scoring ...") as status:
        for policy in POLICIES:
            status.update(f"scoring {len(samples):,} samples by {policy} ...")
            results.append(judged(policy, samples)[0])
    Console(width=110).print(table_of(results))
    common.write(options.json, results)


if __name__ == "__main__":
    main()
