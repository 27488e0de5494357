"""Defines the configuration keys for images, each with its unit and its default."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import BeforeValidator, Field

from .nodes import Flag, Node, PositiveInt, no_bool, takes


class ImageLimits(Node):
    """What is sent of the images of a sample."""

    max_count: PositiveInt = 16
    """Most images of a sample, those of the prompt and of the response together. A sample with more fails. Default:
    16."""

    max_side: Annotated[int, Field(ge=16), BeforeValidator(no_bool)] = 2048
    """Longest side in pixels. A larger image is scaled down to it. Default: 2048."""

    max_bytes: PositiveInt = 5_242_880
    """Largest image in bytes, as it is sent, without the third that base64 adds. If an image is larger after it was
    scaled down, its sample fails. Default: 5,242,880 (5 MiB)."""

    folder: Annotated[str, Field(min_length=1)] | None = None
    """Folder of the images whose paths stand in prompts; a path that leads out of it is refused. Default: none, and a
    sample with a path fails."""

    allow_urls: Flag = False
    """Whether http and https URLs of images are passed on to the server, which then fetches them. A prompt from others
    can make the server call any address in its network. Such answers are not used again from a journal. Default:
    false, and a sample with such a URL fails. URLs are never fetched here."""


class JudgeImages(ImageLimits):
    """Which images a judge sees, and what is sent of them."""

    send: Annotated[Literal["auto"] | Flag, takes("`auto`, true or false")] = "auto"
    """Whether the judge sees the images of the prompt and of the response. `auto` (default): if a source with `vision:
    true` may answer it; samples with images then go to such sources only. `true`: always; all sources of the judge must
    take images. `false`: never; the prompt says `[image]` in their place."""
