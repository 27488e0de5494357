"""Turns the images of a sample into parts of messages in the form of chat completions, within configured limits."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..config.models import ImageLimits
from ..errors import InputError, Mistake
from ..samples import Message, Sample
from ..samples.images import EncodedImage, Image, is_image_part, remote_url
from ..samples.images.encoded import named


@dataclass(frozen=True, slots=True)
class ShownImage:
    """One image of a sample: its name ("image 1 of the prompt"), and the part of a message that holds it."""

    name: str
    part: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class ShownImages:
    """The images of a sample. `messages` are those of its prompt, with a name in the place of each image."""

    messages: Sequence[Message]
    images: Sequence[ShownImage]

    def parts(self) -> Iterator[dict[str, Any]]:
        """Yield the content parts that show the images, each below its name."""
        for image in self.images:
            yield {"type": "text", "text": f"{image.name[0].upper()}{image.name[1:]}:"}
            yield dict(image.part)


def folder_mistakes(path: str, limits: ImageLimits) -> list[Mistake]:
    """Return the mistake of a folder of images that does not exist. `path` is that of `limits` in the configuration."""
    if limits.folder is None or Path(limits.folder).expanduser().is_dir():
        return []
    problem = f"there is no folder {limits.folder!r}."
    return [Mistake(f"{path}.folder", problem, "Name the folder of the images, or leave it out.")]


def with_images(messages: Sequence[Any], images: Sequence[ShownImage]) -> list[Any]:
    """Return messages with `images`, those of the prompt, in the places where they stand."""
    left = iter([image for image in images if image.name.endswith("prompt")])
    return _with_parts(messages, lambda part: dict(next(left).part))


def has_images(sample: Sample) -> bool:
    """Whether a sample has an image, in its prompt or its response."""
    return bool(sample.response_images or _images_in(sample.messages))


def has_urls(sample: Sample) -> bool:
    """Whether an image of the prompt is the URL of one."""
    return any(remote_url(part) is not None for part in _images_in(sample.messages))


def shown_images(sample: Sample, limits: ImageLimits, where: str) -> ShownImages:
    """Return the images of a sample within `limits`, which are at `where` in the configuration.

    Raises `InputError` for too many images, and for an image that is broken, animated, too large, or not given itself.
    """
    count = len(_images_in(sample.messages)) + len(sample.response_images)
    if count > limits.max_count:
        raise InputError(f"the sample has {count:,} images, but {where}.max_count is {limits.max_count:,}")
    images: list[ShownImage] = []

    def shown(part: Any) -> dict[str, Any]:
        name = f"image {len(images) + 1} of the prompt"
        images.append(ShownImage(name, image_part(part, name, limits, where)))
        return {"type": "text", "text": f"[{name}]"}

    messages = _with_parts(sample.messages, shown)
    for number, image in enumerate(sample.response_images, start=1):
        name = f"image {number} of the response"
        images.append(ShownImage(name, image_part(image, name, limits, where)))
    return ShownImages(messages, images)


def _images_in(messages: Iterable[Any]) -> list[Any]:
    """Return the parts of messages that are images."""
    found: list[Any] = []
    for message in messages:
        # `type` first: this runs for every sample, and a protocol takes ten times as long.
        is_mapping = type(message) is dict or isinstance(message, Mapping)
        content: Any = message.get("content") if is_mapping else None
        if isinstance(content, (list, tuple)):
            found += filter(is_image_part, content)
    return found


def _with_parts(messages: Iterable[Any], change: Callable[[Any], Any]) -> list[Any]:
    """Return messages, with what `change` makes of each part that is an image."""
    turns: list[Any] = []
    for message in messages:
        if _images_in([message]):
            parts = [change(part) if is_image_part(part) else part for part in message["content"]]
            message = {**message, "content": parts}
        turns.append(message)
    return turns


def image_part(value: Any, name: str, limits: ImageLimits, where: str) -> dict[str, Any]:
    """Return the part of a message that holds the image `value`, in the form of chat completions.

    Raises `InputError` for a value that is no image, and for a URL unless `limits` allow it.
    """
    url = remote_url(value)
    if url is not None:
        if not limits.allow_urls:
            raise InputError(
                f"{name} is a URL, and images are not fetched; give the image itself, or set {where}.allow_urls to "
                "let the server fetch it"
            )
        return {"type": "image_url", "image_url": {"url": url}}
    with named(name):
        image = Image.of(value, folder=limits.folder)
    encoded = EncodedImage(image, name=name, max_side=limits.max_side, max_bytes=limits.max_bytes)
    return {"type": "image_url", "image_url": {"url": encoded}}
