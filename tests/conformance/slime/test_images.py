"""Images as slime itself reads them from a row, and what the adapter makes of them."""

from __future__ import annotations

import base64
import io
import json
import subprocess
import sys

import pytest

from qreward_plugins.samples.images import Image
from qreward_plugins.testing import SlimeSample
from qreward_plugins.testing.slime.generation import prompt_of
from slime_adapter.samples import to_sample

Pillow = pytest.importorskip("PIL.Image", reason="Pillow is not installed")

PROGRAM = """
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
inputs["images"] = inputs["images"] and [png(image) for image in inputs["images"]]
print(json.dumps([prompt, inputs]))
"""


def png(colour):
    target = io.BytesIO()
    Pillow.new("RGB", (8, 6), colour).save(target, format="PNG")
    return target.getvalue()


def test_the_images_of_a_row_are_those_that_slime_reads(slime_source, tmp_path):
    path = tmp_path / "a.png"
    path.write_bytes(png("red"))
    url = "data:image/png;base64," + base64.b64encode(png("blue")).decode()
    row = {"prompt": "<image>What is it? <image>", "images": [str(path), url]}
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, str(slime_source)], input=json.dumps(row), capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    prompt, inputs = json.loads(done.stdout.splitlines()[-1])
    pictures = [Pillow.open(io.BytesIO(base64.b64decode(data))) for data in inputs["images"]]
    real = to_sample(SlimeSample(prompt=prompt, multimodal_inputs={**inputs, "images": pictures}))
    parts = real.messages[0]["content"]
    assert [part["type"] for part in parts] == ["image", "text", "image"]
    assert [Image.of(part) for part in parts[::2]] == [Image.of(picture) for picture in pictures]
    assert [picture.getpixel((0, 0)) for picture in pictures] == [(255, 0, 0), (0, 0, 255)]
    assert real.response_images == []
    fake = prompt_of({"prompt": prompt, "images": pictures})
    assert set(fake.multimodal_inputs) == set(inputs)
    assert to_sample(fake).messages == real.messages
