"""Messages with images: those of `FakeVerlTrainer`'s data set against those of verl (utils/dataset/rl_dataset.py)."""

from __future__ import annotations

import copy
import io
from types import SimpleNamespace

import pytest

pytest.importorskip("verl", reason="verl is not installed (pip install 'qreward-plugins[demo]')")
Pillow = pytest.importorskip("PIL.Image", reason="Pillow is not installed")

from qreward_plugins.samples.images import Image  # noqa: E402
from qreward_plugins.testing.verl.data import build_messages  # noqa: E402

from .agreement import VERLS_WARNINGS  # noqa: E402

pytestmark = VERLS_WARNINGS

RED, GREY = Pillow.new("RGB", (8, 6), "red"), Pillow.new("L", (8, 6), 9)


def png():
    target = io.BytesIO()
    GREY.save(target, format="PNG")
    return target.getvalue()


def user(text):
    return [{"role": "system", "content": "s"}, {"role": "user", "content": text}]


ROWS = [
    (user("<image>What?"), [RED]),
    (user("look: <image>\n<image> and"), [GREY, RED]),
    (user("<image>"), [{"bytes": png(), "path": "a.png"}]),
    (user("<image>"), [{"image": RED, "max_pixels": 9}]),
    (user("<image>What?"), ["a.png"]),
    (user("What?"), []),
    (user("<image>"), []),
    (user([{"type": "text", "text": "<image>"}]), []),
    (user("What?"), [RED]),
    (user("<image>"), [RED, RED]),
    (user("<image><image>"), [RED]),
    (user("<image>"), [3]),
]


def plain(messages):
    """Messages with a hash in the place of each image."""
    return [
        {
            **message,
            "content": message["content"]
            if isinstance(message["content"], str)
            else [
                {key: Image.of(value).digest if hasattr(value, "tobytes") else value for key, value in part.items()}
                for part in message["content"]
            ],
        }
        for message in messages
    ]


def told(build, messages, images):
    try:
        return plain(build(copy.deepcopy(messages), copy.deepcopy(images)))
    except (AssertionError, TypeError) as error:
        return type(error), str(error)


@pytest.mark.parametrize(("messages", "images"), ROWS)
def test_images_get_to_the_same_places(messages, images):
    from verl.utils.dataset.rl_dataset import RLHFDataset

    own = SimpleNamespace(image_key="images", video_key="videos", audio_key="audios", processor=object())

    def real(messages, images):
        return RLHFDataset._build_messages(own, {"prompt": messages, "images": images}, key="prompt")

    assert told(build_messages, messages, images) == told(real, messages, images)
