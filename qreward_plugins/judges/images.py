"""Decides which images of a sample a judge sees, and names them.

A judge model sees the images outside of the fences around the texts. They are numbered, and a text names an image at
its place: `[image 1 of the prompt]`.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import replace

from ..config import Config
from ..config.judge_models import ImageLimits, JudgeImages
from ..errors import Mistake
from ..samples import Sample, Verdict
from ..samples.images import EXTRA, has_pillow
from ..scheduling.calls import Call
from ..sources.image_parts import ShownImages, folder_mistakes, has_images, has_urls, shown_images

_log = logging.getLogger("qreward_plugins.judges")


class ImageRules:
    """Which images a judge sends, and to which of its sources.

    `sources` are all that may answer the judge, and `vision` are those of them whose models read images.
    """

    def __init__(self, judge: str, config: JudgeImages, *, sources: Sequence[str], vision: Sequence[str]) -> None:
        self._judge = judge
        self._limits: ImageLimits = config
        self.sends = bool(vision) if config.send == "auto" else config.send
        self._sources = tuple(vision) if config.send == "auto" and vision else tuple(sources)
        self._warns = config.send == "auto" and not vision

    def mistakes(self) -> list[Mistake]:
        """Return the mistakes of a judge that sends images without Pillow, or from a folder that does not exist."""
        path = f"judges.{self._judge}.images.send"
        mistakes = folder_mistakes(f"judges.{self._judge}.images", self._limits)
        if not self.sends or has_pillow():
            return mistakes
        return [
            *mistakes,
            Mistake(path, "images need Pillow, which is not installed.", f"Run `{EXTRA}`, or set it to false."),
        ]

    def sent(self, sample: Sample) -> bool:
        """Whether the sample has images that are sent. Warns once of a judge that does not send images."""
        if not self.sends and not self._warns:
            return False
        found = has_images(sample)
        if found and self._warns:
            self._warns = False
            _log.warning(
                "A sample has images, and judge %s does not see them, because none of its sources has `vision: true`. "
                "Set it at a source whose model reads images; or set judges.%s.images.send to false if the judge needs "
                "no images.",
                self._judge,
                self._judge,
            )
        return found and self.sends

    def call(self, call: Call[Verdict], sample: Sample) -> Call[Verdict]:
        """Return the call of a sample. One with images goes only to sources that read them."""
        if not self.sent(sample):
            return call
        # What a URL leads to may change, so the answer is not used again.
        return replace(call, sources=self._sources, identity="" if has_urls(sample) else call.identity)

    def of(self, sample: Sample) -> ShownImages:
        """Return the images of a sample.

        Raises `InputError` for too many images, and for an image that is broken, animated, too large, or not given
        itself.
        """
        return shown_images(sample, self._limits, f"judges.{self._judge}.images")


def vision_sources(config: Config, names: Sequence[str]) -> tuple[str, ...]:
    """Return those of the sources `names` whose configuration says that their model reads images."""
    return tuple(name for name in names if getattr(config.sources.get(name), "vision", False))
