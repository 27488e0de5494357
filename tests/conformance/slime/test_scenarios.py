"""slime's own rollout with every judge: the job goes on, what failed does not train, and the fake does the same.

Without slime the fake's half runs alone, held against what must hold of slime.
"""

from __future__ import annotations

import base64
import io
import json
import re
import subprocess
import sys

import pytest

from qreward_plugins.samples.images import Image
from qreward_plugins.testing import SlimeSample
from qreward_plugins.testing.slime.samples import prompt_of
from slime_adapter.samples import to_sample

from ..checks import outcomes
from ..judges import GROUPS, Judge
from ..scenarios import MORE_BAD_MINUTES, Scenario
from . import fake, scenarios
from .checks import check
from .real import play

FLAG = ("--data-source-path", "slime_adapter.DataSource")
TREE = {
    "sources": {"judge": {"kind": "openai", "base_url": "http://127.0.0.1:9/v1", "model": "judge"}},
    "judges": {"quality": {"kind": "llm", "criteria": {"rigor": "is it rigorous?"}}},
}


@pytest.fixture(scope="module")
def played_by_fake():
    """What the fake made of a scenario, played once."""
    played = {}

    def of(scenario):
        return played.get(scenario.name) or played.setdefault(scenario.name, fake.play(scenario))

    return of


@pytest.mark.parametrize("scenario", scenarios.SHARED, ids=str)
def test_the_fake_does_what_must_hold_of_slime(played_by_fake, scenario):
    check(scenario, played_by_fake(scenario))


@pytest.mark.parametrize("scenario", scenarios.SHARED, ids=str)
def test_slime_does_it_and_the_fake_agrees(play_once, played_by_fake, scenario):
    theirs, ours = play_once(scenario), played_by_fake(scenario)
    check(scenario, theirs)
    pairs = [*zip(ours.steps, theirs.steps, strict=True), *zip(ours.evaluations, theirs.evaluations, strict=True)]
    for mine, slimes in pairs:
        assert names(mine) == names(slimes)
        # Elsewhere who is scored depends on who comes first.
        if scenario.scored != "some":
            assert outcomes(mine) == pytest.approx(outcomes(slimes), abs=1e-4)
    if items := scenarios.FILTERED_ITEMS.get(scenario.name):
        assert {sample.draft.item for sample in theirs.steps[0].samples} == items
        assert theirs.steps[0].metrics.get("rollout/dynamic_filter/drop_qreward_failed", 0) == (items != {0, 1})
    if scenario in scenarios.FILTERED_DEAD:
        reasons = "infra/garbage|verdict/invalid" if scenario.judge.listens else "infra/"
        assert re.search(reasons, theirs.error_text), theirs.error_text
    if scenario in scenarios.REWARD_KEY:
        (step,) = theirs.steps
        causes = {sample.cause for sample in step.samples}
        assert causes > {""}
        for cause in causes:
            share = sum(sample.cause == cause for sample in step.samples) / len(step.samples)
            assert step.metrics[f"rollout/error_cat/{cause}"] == pytest.approx(share)
    if scenario.name == "slow-single":
        waited = [sample.seconds for sample in theirs.steps[0].samples]
        assert min(waited) > 0
        assert theirs.steps[0].metrics["perf/non_generation_time/max"] == max(waited)


def names(step):
    """The metrics of rewards, without those that tell how the time went."""
    return {name for name in step.metrics if "/qreward/" in name and "/blame_s/" not in name}


@pytest.mark.parametrize("scenario", [*MORE_BAD_MINUTES, *scenarios.PARTIAL_JUDGES], ids=str)
def test_what_only_slime_plays(play_once, scenario):
    check(scenario, play_once(scenario))


@pytest.mark.parametrize("scenario", scenarios.WITHOUT_HOOK, ids=str)
def test_without_the_post_process_hook_the_flag_is_named_once(new_player, scenario):
    said = play(scenario, new_player).said
    assert len(said) == 1
    assert "--custom-reward-post-process-path slime_adapter.post_process" in said[0]


@pytest.mark.parametrize("key", [None, "score"])
def test_a_generation_that_was_lost_is_a_failed_sample(player, key):
    """The server ends a generation as aborted though slime did not ask: that sample never sees the reward function."""
    played = play(Scenario("lost", Judge(), "any", reward_key=key), player, loses=lambda draft: draft.draft == 2)
    assert played.error is None, played.error_text
    lost = [sample for sample in played.steps[0].samples if sample.status == "aborted"]
    assert len(lost) == GROUPS
    assert all(sample.removed and sample.trained == 0.0 and not any(sample.mask) for sample in lost)
    assert played.said == ()


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
    scenario = Scenario("start", Judge(), "all", evaluate="--eval-interval" in flags)
    played = play(scenario, player, flags=[*FLAG, *flags], tree=tree)
    assert (played.error, played.steps) == ("ConfigurationError", ())
    assert told in played.error_text


def test_a_run_without_mistakes_is_slimes_own_and_another_reward_function_is_one(player):
    scenario = Scenario("start", Judge(), "all")
    check(scenario, play(scenario, player, flags=FLAG))
    played = play(scenario, player, flags=[*FLAG, "--rm-type", "math"], custom_rm=None)
    assert played.error == "ConfigurationError"
    assert "Add --custom-rm-path slime_adapter.reward" in played.error_text


IMAGES = """
import base64, io, json, sys
sys.path.insert(0, sys.argv[1])
from slime.utils.data import _build_messages
from slime.utils.processing_utils import process_vision_info
prompt = _build_messages(json.load(sys.stdin), "prompt", True, {"image": "images"})
inputs = process_vision_info(prompt, object())
def png(image):
    target = io.BytesIO()
    image.save(target, format="PNG")
    return base64.b64encode(target.getvalue()).decode()
inputs["images"] = [png(image) for image in inputs["images"]]
print(json.dumps([prompt, inputs]))
"""


def test_the_images_of_a_row_are_those_that_slime_reads(slime_source):
    pillow = pytest.importorskip("PIL.Image", reason="Pillow is not installed")
    target = io.BytesIO()
    pillow.new("RGB", (8, 6), "blue").save(target, format="PNG")
    url = "data:image/png;base64," + base64.b64encode(target.getvalue()).decode()
    row = {"prompt": "<image>What is it? <image>", "images": [url, url]}
    command = [sys.executable, "-c", IMAGES, str(slime_source)]
    done = subprocess.run(command, input=json.dumps(row), capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    prompt, inputs = json.loads(done.stdout.splitlines()[-1])
    pictures = [pillow.open(io.BytesIO(base64.b64decode(data))) for data in inputs["images"]]
    real = to_sample(SlimeSample(prompt=prompt, multimodal_inputs={**inputs, "images": pictures}))
    parts = real.messages[0]["content"]
    assert [part["type"] for part in parts] == ["image", "text", "image"]
    assert [Image.of(part) for part in parts[::2]] == [Image.of(picture) for picture in pictures]
    assert pictures[0].getpixel((0, 0)) == (0, 0, 255)
    fake_sample = prompt_of({"prompt": prompt, "images": pictures})
    assert set(fake_sample.multimodal_inputs) == set(inputs)
    assert to_sample(fake_sample).messages == real.messages
