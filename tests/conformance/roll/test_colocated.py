"""A judge on the GPUs of a real ROLL pipeline sleeps whenever ROLL trains, and is awake for every reward."""

from __future__ import annotations

from itertools import groupby

import pytest

from tests.kit import wait_until
from tests.replicas.conftest import StandIns

from ..judges import GROUP_SIZE, GROUPS, Judge
from ..scenarios import Scenario
from .scenarios import DOMAIN, NOTES, PIPELINE_S, TAG, keys_of

STEPS = 3
DEADLINE_S = 120.0


@pytest.fixture
def stand_ins(tmp_path):
    return StandIns(tmp_path)


@pytest.fixture
def run(player, stand_ins, tmp_path):
    """Run the pipeline with a judge on its GPUs, and further keys. Returns what is told."""
    own = {"kind": "replicas", "server": "vllm", "model": str(stand_ins.weights("first")), "platform": "cpu"}
    own |= {"colocated": True, "sleep_mode": True}
    judge = {"kind": "llm", "score_range": [0, 10], "max_tokens": 64, "correct_at": 0.5}
    tree = {"sources": {"own": own}, "judges": {"quality": judge}, "engine": {"deadline_s": DEADLINE_S}}
    keys = keys_of(Scenario("colocated", Judge(), "all", workers=2), "")
    keys["rewards"][DOMAIN] |= {"reward_manager_config": [tree], "model_args": {"model_name_or_path": "${pretrain}"}}
    noting = {"system_envs": {NOTES: str(tmp_path / "notes")}}

    def run(**more):
        own["program"] = stand_ins.program("questions", "delay=0.05")
        whole = {
            **keys,
            "actor_train": noting,
            "reference": noting,
            "enable_reference": True,
            "enable_old_logprobs_recompute": True,
            "validation": {"generating_args": {"max_new_tokens": 16, "num_return_sequences": 1}},
            "max_steps": STEPS,
            **more,
        }
        reply = player.ask("pipeline", keys=whole, tags={TAG: DOMAIN}, val_tags={TAG: DOMAIN}, timeout_s=PIPELINE_S)
        assert reply.error is None, reply.text
        assert not reply.complaints, "\n".join(reply.complaints)
        return reply.result

    return run


def check(told, stand_ins):
    """What must hold of every run that trains to its end."""
    assert told["stage"] == "done", (told["error"], told["text"])
    assert len(told["trained"]) == len(told["logged"]) == STEPS
    for step, metrics in zip(told["trained"], told["logged"], strict=True):
        assert [bool(sample["mask"]) for sample in step["samples"]] == [True] * GROUPS * GROUP_SIZE
        assert metrics["val_correct/all/mean"] == 1.0, "so has every sample of the validation"
    events = [event for event, _ in groupby(line.split()[1].partition("?")[0] for line in stand_ins.notes())]
    begins = ["/start", *["/wake_up"] * (STEPS - 1)]
    trains = ["/compute_log_probs", "/train_step"]
    # ROLL's actor keeps the GPUs until the next step begins.
    assert events == [event for begin in begins for event in ("/offload_states", begin, "/ask", "/sleep", *trains)]
    wait_until(lambda: not stand_ins.living())  # the servers end with the training


@pytest.mark.parametrize("more", [{}, {"generate_opt_level": 0}], ids=["each response", "whole batches"])
def test_the_judge_sleeps_while_roll_trains(more, run, stand_ins):
    check(run(**more), stand_ins)
