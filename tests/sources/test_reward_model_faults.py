"""Every fault that the judge server knows, met by reward models with one text and with several in a request."""

from __future__ import annotations

import asyncio
import json
from contextlib import suppress
from typing import Any

import pytest

from qreward_plugins import RewardEngine, Sample
from qreward_plugins.errors import InvalidReply, PermanentError, QRewardError, SourceUnusable, Throttled, TransientError
from qreward_plugins.samples import Failed, Scored
from qreward_plugins.sources import Reply, Request, RewardModelSource
from qreward_plugins.testing import FaultKind, Faults, JudgeServer, PlayFault, ScoreCall

pytestmark = pytest.mark.anyio
PATIENCE_S = 20.0
TEMPLATE = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"

CLASSES: dict[type, set[str]] = {
    PermanentError: {"error_400", "error_413", "error_422"},
    SourceUnusable: {"error_401", "error_403", "error_404", "redirect", "redirect_loop"},
    Throttled: {kind.value for kind in FaultKind if kind.value.startswith("error_429")} | {"error_503_seconds"},
    InvalidReply: {"results_too_few", "results_too_many", "no_choices", "wrong_json_type"},
    Reply: {"close_after", "wrong_model", "slow_headers", "slow_body", "results_shuffled"}
    | {"two_verdicts", "forged_verdict", "wrong_nonce", "duplicate_keys"}
    | {kind.value for kind in FaultKind if kind.stage == "stream"},
}
FIRST_ONLY = {kind.value for kind in FaultKind if kind.stage == "verdict"} - CLASSES[Reply]
"""Faults of one result, which cost no other."""
UNNUMBERED = ("results_unnumbered", "results_misnumbered")
CLOSING = ("close_after", "slow_headers", "slow_body", "short_length")
PROTOCOLS = ("vllm_classify", "vllm_pooling", "vllm_score", "sglang_classify", "tei_predict", "openrlhf")
KINDS = [kind for kind in FaultKind if kind is not FaultKind.HANG]
OF_LISTS = [kind for kind in KINDS if kind.stage == "list"]


def length(call: ScoreCall) -> float:
    return float(len(call.response.rpartition("assistant: ")[2].strip()))


@pytest.fixture
def node(tmp_path: Any, client: str, key: str) -> Any:
    """The configuration of a source at a judge server."""
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"chat_template": TEMPLATE}))

    def made(server: JudgeServer, protocol: str = "vllm_classify", **settings: Any) -> dict[str, Any]:
        own = {} if protocol == "vllm_score" else {"chat_template": str(tmp_path)}
        return {
            "kind": "reward_model",
            "base_url": server.root_url,
            "model": "judge",
            "protocol": protocol,
            "batch": {"max_size": 8},
            "api_key": key,
            "client": client,
            **own,
            **settings,
        }

    return made


def requests_of(size: int) -> list[Request]:
    turn = {"role": "user", "content": "2 + 2?"}
    texts = ["a" * (n + 1) for n in range(size)]
    return [Request(Sample([], text), messages=(turn, {"role": "assistant", "content": text})) for text in texts]


def expected(kind: FaultKind, protocol: str, size: int) -> type:
    if kind.value in FIRST_ONLY:
        return InvalidReply
    if kind.value in UNNUMBERED:
        # A single result needs no index, and a server that states none keeps the order.
        return InvalidReply if size > 1 and protocol.startswith("vllm") else Reply
    found = [outcome for outcome, names in CLASSES.items() if kind.value in names]
    return found[0] if found else TransientError


async def sent(source: RewardModelSource, requests: list[Request], on_sent: Any = lambda: None) -> Any:
    """The results, or the error of the request."""
    try:
        if len(requests) == 1:
            return [await asyncio.wait_for(source.send(requests[0], on_sent=on_sent), PATIENCE_S)]
        return await asyncio.wait_for(source.send_batch(requests, on_sent=on_sent), PATIENCE_S)
    except QRewardError as error:
        return error


@pytest.mark.parametrize(("protocol", "size"), [("vllm_classify", 1), *((protocol, 3) for protocol in PROTOCOLS)])
async def test_every_fault_has_its_class(protocol: str, size: int, node: Any, key: str, next_fault: Any) -> None:
    # The protocols differ in their results only, so the faults below these are played with one of them.
    kinds = KINDS if protocol == "vllm_classify" else OF_LISTS
    requests, scores = requests_of(size), [float(n + 1) for n in range(size)]
    with JudgeServer(length, faults=next_fault.faults, api_key=key) as server:
        source = RewardModelSource("rm", RewardModelSource.Config.model_validate(node(server, protocol)))
        for kind in next_fault.each(kinds):
            begun: list[int] = []
            outcome = await sent(source, requests, lambda begun=begun: begun.append(1))
            first = outcome[0] if isinstance(outcome, list) else outcome
            assert type(first) is expected(kind, protocol, size), (kind, outcome)
            assert begun == [1], kind
            assert key not in str(first)
            if isinstance(outcome, list):
                good = outcome[1:] if kind.value in FIRST_ONLY else outcome
                assert [next(iter(each.value.values())) for each in good] == scores[size - len(good) :], kind
            if kind.value in CLOSING:
                # The next request may still be written into the connection that is going away.
                with suppress(QRewardError):
                    await sent(source, requests)
            again = await sent(source, requests)
            assert [next(iter(each.value.values())) for each in again] == scores, kind
        await source.aclose()


async def test_a_hang_ends_with_the_attempt(node: Any, key: str) -> None:
    with JudgeServer(length, faults=Faults(script=["hang"]), api_key=key) as server:
        source = RewardModelSource("rm", RewardModelSource.Config.model_validate(node(server)))
        task = asyncio.create_task(source.send_batch(requests_of(3), on_sent=lambda: None))
        await asyncio.to_thread(server.wait_for, lambda report: report.faults == {"hang": 1})
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        await asyncio.to_thread(server.wait_for, lambda report: report.in_flight == 0)
        await source.aclose()


@pytest.mark.parametrize("fault", ["error_400", "error_422", "results_too_few", "score_nan"])
async def test_an_engine_scores_around_one_bad_text(fault: str, node: Any, key: str) -> None:
    """Every request that holds the text fails. `results_too_few` and `score_nan` hit the first request instead."""
    answered = fault in ("results_too_few", "score_nan")

    def score(call: ScoreCall) -> float:
        if "b" * 60 in call.response and not answered:
            raise PlayFault(fault)
        return length(call) / 100

    faults = Faults(script=[None, None, fault] if answered else [])  # the first two are the probe of the start
    with JudgeServer(score, faults=faults, api_key=key) as server:
        config = {
            "sources": {"rm": node(server, limits={"concurrency": 1})},
            "judges": {"j": {"kind": "reward_model"}},
        }
        texts = ["a" * (n + 1) for n in range(15)] + ["b" * 60]
        async with RewardEngine(config) as engine:
            samples = [Sample([{"role": "user", "content": "2 + 2?"}], text) for text in texts]
            outcomes = await asyncio.wait_for(engine.score_all(samples), 2 * PATIENCE_S)
            assert engine.statistics().sources["rm"].mean_batch_size > 1
        report = server.report()
    assert [outcome.verdict.score for outcome in outcomes[:15]] == [pytest.approx((n + 1) / 100) for n in range(15)]
    assert isinstance(outcomes[15], Scored if answered else Failed)
    assert report.faults[fault] >= 1
    assert report.requests <= 30
