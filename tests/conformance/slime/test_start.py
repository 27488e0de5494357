"""What `slime_adapter.DataSource` finds when slime starts, with slime's own parser and rollout manager."""

from __future__ import annotations

import pytest

from ..judges import Judge
from .checks import check
from .real import play
from .scenarios import Scenario

SCENARIO = Scenario("start", Judge(), "all")
FLAG = ("--data-source-path", "slime_adapter.DataSource")
TREE = {
    "sources": {"judge": {"kind": "openai", "base_url": "http://127.0.0.1:9/v1", "model": "judge"}},
    "judges": {"quality": {"kind": "llm", "criteria": {"rigor": "is it rigorous?"}}},
}


def test_a_run_without_mistakes_is_slimes_own(player):
    check(SCENARIO, play(SCENARIO, player, flags=FLAG))


@pytest.mark.parametrize(
    ("flags", "tree", "told"),
    [
        (["--group-rm", "--eval-interval", "1"], TREE, "--eval-function-path slime_adapter.eval_rollout"),
        (["--reward-key", "rigour"], TREE, "Did you mean `rigor`?"),
        (["--dynamic-sampling-filter-path", "slime_adapter.drop"], TREE, "slime cannot load 'slime_adapter.drop'"),
        ([], {**TREE, "limits": {"concurrency": 3}}, "limits: unknown key"),
        ([], {}, "Give slime `--custom-config-path FILE`"),
    ],
    ids=["group-rm", "reward-key", "hook", "tree", "nothing"],
)
def test_a_mistake_ends_the_run_before_anything_is_generated(player, flags, tree, told):
    evaluated = Scenario("start", Judge(), "all", evaluate="--eval-interval" in flags)
    played = play(evaluated, player, flags=[*FLAG, *flags], tree=tree)
    assert (played.error, played.steps) == ("ConfigurationError", ())
    assert told in played.error_text


def test_without_a_reward_function_slime_would_train_on_another_one(player):
    played = play(SCENARIO, player, flags=[*FLAG, "--rm-type", "math"], custom_rm=None)
    assert played.error == "ConfigurationError"
    assert "Add --custom-rm-path slime_adapter.reward" in played.error_text
