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
from ..played import once
from ..scenarios import Scenario
from . import fake, scenarios
from .checks import check
from .real import play

FLAG = ("--data-source-path", "slime_adapter.DataSource")


played_by_fake = once(fake.play)


@pytest.mark.parametrize("scenario", scenarios.ALONE, ids=str)
def test_the_fake_does_what_must_hold_of_slime(scenario):
    check(scenario, played_by_fake(scenario))


@pytest.mark.parametrize("scenario", scenarios.SHARED, ids=str)
def test_slime_does_it_and_the_fake_agrees(play_once, scenario):
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


def names(step):
    """The metrics of rewards, without those that tell how the time went."""
    return {name for name in step.metrics if "/qreward/" in name and "/blame_s/" not in name}


@pytest.mark.parametrize("scenario", scenarios.PARTIAL_JUDGES, ids=str)
def test_what_only_slime_plays(play_once, scenario):
    check(scenario, play_once(scenario))


@pytest.mark.parametrize("key", [None, "score"])
def test_a_generation_that_was_lost_is_a_failed_sample(player, key):
    """The server ends a generation as aborted though slime did not ask: that sample never sees the reward function."""
    played = play(Scenario("lost", Judge(), "any", reward_key=key), player, loses=lambda draft: draft.draft == 2)
    assert played.error is None, played.error_text
    lost = [sample for sample in played.steps[0].samples if sample.status == "aborted"]
    assert len(lost) == GROUPS
    assert all(sample.removed and sample.trained == 0.0 and not any(sample.mask) for sample in lost)
    assert played.said == ()


def test_a_mistake_ends_the_run_before_anything_is_generated(player):
    scenario = Scenario("start", Judge(), "all", evaluate=True)
    played = play(scenario, player, flags=[*FLAG, "--group-rm"])
    assert (played.error, played.steps) == ("ConfigurationError", ())
    assert "--eval-function-path slime_adapter.eval_rollout" in played.error_text


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
inputs["images"] = [list(image.convert("RGB").getdata()) for image in inputs["images"]]
print(json.dumps([prompt, inputs]))
"""


def test_the_images_of_a_row_are_those_that_slime_reads(slime_source):
    pillow = pytest.importorskip("PIL.Image", reason="Pillow is not installed")
    picture, target = pillow.new("RGB", (8, 6), "blue"), io.BytesIO()
    picture.save(target, format="PNG")
    url = "data:image/png;base64," + base64.b64encode(target.getvalue()).decode()
    row = {"prompt": "<image>What is it? <image>", "images": [url, url]}
    command = [sys.executable, "-c", IMAGES, str(slime_source)]
    done = subprocess.run(command, input=json.dumps(row), capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    prompt, inputs = json.loads(done.stdout.splitlines()[-1])
    assert inputs["images"] == [[[0, 0, 255]] * 48] * 2
    real = to_sample(SlimeSample(prompt=prompt, multimodal_inputs={**inputs, "images": [picture] * 2}))
    parts = real.messages[0]["content"]
    assert [part["type"] for part in parts] == ["image", "text", "image"]
    assert [Image.of(part) for part in parts[::2]] == [Image.of(picture)] * 2
    fake_sample = prompt_of({"prompt": prompt, "images": [picture] * 2})
    assert set(fake_sample.multimodal_inputs) == set(inputs)
    assert to_sample(fake_sample).messages == real.messages
