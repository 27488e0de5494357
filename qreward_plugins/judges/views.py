"""What a judge sees of a sample: all of the response, or not the thoughts in it, or its answer alone; all of the
prompt, or its last turn, or nothing (`View`); the plain texts of these (`SampleTexts`); and its images, within
configured limits (`ImageRules`).

A response is one text here, as the trainers give it, so there is no choice of its last turn.

Data sets contain values that the types do not allow: content as a list of parts, tool calls with an empty content,
ground truths that are numbers, arrays or nested mappings. They are written as text. A value that cannot be written
raises an `InputError`, which names types and never quotes the sample. The texts are not fenced; the caller fences them.

A judge model sees the images outside of the fences around the texts, as parts of messages in the form of chat
completions. They are numbered, and a text names an image at its place: `[image 1 of the prompt]`.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any, Literal

from pydantic import model_validator
from typing_extensions import Self

from ..config.models import ImageLimits
from ..config.nodes import Node
from ..errors import InputError, Mistake, kind_of
from ..samples import Message, Sample, Verdict
from ..samples.check import blamed, plain_messages, text_of
from ..samples.images import EXTRA, EncodedImage, Image, has_pillow, is_image_part, remote_url
from ..samples.images.encoded import named
from ..samples.json_values import as_json, encoded, json_text
from ..scheduling.calls import Call
from .base import Opening
from .extraction import AnswerPattern, AnswerPlace, Extract, extracted
from .fence import TURN, is_blank, readable
from .verdicts import after_thoughts

_log = logging.getLogger("qreward_plugins.judges")

_PATTERN_S = 0.05
"""Longest time of a pattern for one response. The event loop waits for it."""

_LONGEST_ROLE_CHARS = 32
_USUAL = {"role", "content"}
_NOTHING: Message = {"role": "user", "content": ""}


class ShowResponse(Node):
    """What the judge sees of a response."""

    response: Literal["without_thinking", "all", "answer"] = "without_thinking"
    """What it sees of the response. `without_thinking` (default): all but the thoughts with which it begins, such as
    `<think> ... </think>`; a response whose thoughts do not end counts as empty. `all`: everything. `answer`: what
    `extract` finds; a response without an answer gets the floor, and nothing is sent."""

    extract: AnswerPlace | None = None
    """Where the answer stands, for `response: answer`: `all`, `boxed`, `last_line`, `tag`, `marked` or a mapping with
    `regex`, as for the ready-made checks. Default: none."""

    @model_validator(mode="after")
    def _answers_are_found(self) -> Self:
        if (self.response == "answer") != (self.extract is not None):
            raise ValueError("`response: answer` and `extract`, which says where the answer stands, need each other")
        return self


class Show(ShowResponse):
    """What the judge sees of a sample."""

    prompt: Literal["all", "last_user", "none"] = "all"
    """What it sees of the prompt: all turns (default), the last turn of the user, or nothing. Images of other turns are
    not sent."""


class View:
    """What the judge `name` sees of samples. `answer` is the place of the answer that a task shows instead of the
    response; None: the configuration decides.

    It says once in the log what the judge does not see.
    """

    def __init__(self, name: str, show: ShowResponse, answer: AnswerPattern | str | None = None) -> None:
        self._name = name
        self._show = show
        self._prompt = show.prompt if isinstance(show, Show) else "all"
        place = show.extract if answer is None else answer
        self.extract: Extract | None = {"regex": place.regex} if isinstance(place, AnswerPattern) else place
        self._said: set[str] = set()

    def of(self, sample: Sample) -> Sample:
        """Return the sample as the judge sees it. Raises `InputError` if its answer or its last turn cannot be found
        out.
        """
        sample = self.without_hidden_images(sample)
        response: Any = sample.response
        if not isinstance(response, str) or isinstance(sample, ListSample):
            return sample  # refused where it is read; of a list, each response was shown before
        shown = self._shown(response)
        if shown == response:
            return sample
        self._say("responses", len(response) - len(shown), len(response))
        return replace(sample, response=shown)

    def without_hidden_images(self, sample: Sample) -> Sample:
        """Return the sample with the turns that the judge sees, and without images of what it does not see."""
        if self.extract is not None and sample.response_images:
            sample = replace(sample, response_images=())
        if self._prompt == "none":
            return replace(sample, messages=(_NOTHING,))
        if self._prompt == "all":
            return sample
        turns: list[Any] = [turn for turn in checked_turns(sample.messages) if turn.get("role") == "user"]
        if not turns:
            raise InputError(
                f"messages has no turn of the user, which judge {self._name} is to see (show.prompt: last_user)"
            )
        hidden = len(sample.messages) - 1
        if hidden:
            self._say("prompts", hidden, len(sample.messages), "turns")
        return replace(sample, messages=turns[-1:])

    def emptiness(self, response: str) -> str:
        """Why the judge sees nothing of a response."""
        if self.extract is not None and not is_blank(response):
            return "the response has no answer where `extract` looks for it"
        return "the response is empty, or ends in its thoughts"

    def _shown(self, response: str) -> str:
        if self.extract is None:
            return response if self._show.response == "all" else after_thoughts(response)
        try:
            return extracted(response, self.extract, within_s=_PATTERN_S)
        except TimeoutError:
            problem = f"takes more than {_PATTERN_S} s on a response of {len(response):,} characters"
            raise InputError(f"the pattern `extract` of judge {self._name} {problem}; write a simpler one") from None

    def _say(self, what: str, hidden: int, of: int, unit: str = "characters") -> None:
        if what not in self._said:
            self._said.add(what)
            part = f"{hidden:,} of {of:,} {unit}"
            _log.info("judge %s sees %s in part (`show`): %s of the first are left out.", self._name, what, part)


@dataclass(frozen=True, slots=True)
class ListSample(Sample):
    """Stands for several samples of one prompt. `response` is all `responses` in their order."""

    responses: tuple[str, ...] = ()

    @classmethod
    def of(cls, sample: Sample, responses: Sequence[str]) -> ListSample:
        """Several responses to the prompt of `sample`."""
        shared = {field.name: getattr(sample, field.name) for field in fields(Sample)}
        own: dict[str, Any] = {"response": "\n\n".join(responses), "response_images": ()}
        return cls(**shared | own, responses=tuple(responses))


# Not frozen: it is made for every call, and a frozen one takes three times as long.
@dataclass(slots=True)
class SampleTexts:
    """The texts of one sample, not truncated. `reference` is None if there is no ground truth."""

    question: str
    response: str
    reference: str | None

    @classmethod
    def of(cls, sample: Sample) -> SampleTexts:
        """Read the texts of `sample`. Raises `InputError` for a value that cannot be written as text."""
        if not isinstance(sample.response, str):
            raise InputError(f"response is of type {kind_of(sample.response)}; write a text")
        if not len(sample.messages):
            raise InputError("messages is empty; write at least one message with role and content")
        return cls(
            question=question_text(sample.messages),
            response=readable(sample.response),
            reference=reference_text(sample.ground_truth),
        )


def question_text(messages: Sequence[Message]) -> str:
    """Return the prompt as text: its one turn, or the whole conversation with roles if there are several turns.

    A system message is not a turn: it is left out if there is one turn, and part of the conversation otherwise. Without
    messages the text is "". Raises `InputError` for messages that cannot be written as text.
    """
    if type(messages) in (list, tuple) and len(messages) == 1:
        only: Any = messages[0]
        # The usual form, which needs no check.
        if type(only) is dict and only.keys() == _USUAL and only["role"] == "user" and type(only["content"]) is str:
            return readable(only["content"])
    checked = checked_turns(messages)
    turns = [message for message in checked if message.get("role") not in ("system", "developer")]
    return _turn_text(turns[0]) if len(turns) == 1 else _conversation(checked)


def conversation_text(messages: Sequence[Message]) -> str:
    """Return all messages of the prompt, each below its role: `[user]`, a line break, the text. If the policy wrote one
    of them, the roles are between `TURN`, because it could forge turns of tools and users otherwise.

    Raises `InputError` for messages that cannot be written as text.
    """
    return _conversation(checked_turns(messages))


def _conversation(messages: Sequence[Mapping[str, Any]]) -> str:
    turns = [(_role(message), _turn_text(message)) for message in messages]
    if all(role != "assistant" for role, _ in turns):
        return "\n\n".join(f"[{role}]\n{text}" for role, text in turns)
    return "\n\n".join(f"{TURN}{role}{TURN}\n{text}" for role, text in turns)


def conversation_turns(messages: Sequence[Message]) -> list[Message]:
    """Return the messages of the prompt as pairs of role and text. Raises `InputError` for messages that cannot be
    written as text.
    """
    return [{"role": _role(message), "content": _turn_text(message)} for message in checked_turns(messages)]


def reference_text(ground_truth: Any) -> str | None:
    """Return the ground truth as text: a string unchanged, any other value as JSON; None if there is none.

    Raises `InputError` for values that JSON cannot hold.
    """
    if ground_truth is None:
        return None
    if issubclass(type(ground_truth), str):
        return readable(str.__str__(ground_truth))
    return readable(json_text(ground_truth, "ground_truth"))


def column_of(sample: Sample, column: str) -> Any:
    """Return the value of a column of the data set: a key of the extras, or the way to one, joined by dots. Raises
    `InputError` if there is none.
    """
    value: Any = sample.extras
    for key in column.split("."):
        if not isinstance(value, Mapping) or key not in value:
            there = ", ".join(sorted(map(str, value))[:20]) if isinstance(value, Mapping) else ""
            raise InputError(f"the sample has no column {column}; it has {there or 'none'}")
        value = value[key]
    return value


def json_column(sample: Sample, column: str | None, where: str) -> Any:
    """Return a value that a column of the data set holds, or JSON text of it; None: the ground truth. `where` begins
    the message of an error. Raises `InputError`.
    """
    value = sample.ground_truth if column is None else column_of(sample, column)
    value = as_json(value, where)
    if not isinstance(value, str):
        return json.loads(encoded(value))  # arrays become lists
    try:
        return json.loads(value)
    except (ValueError, RecursionError):
        raise InputError(f"{where} is a text that is no JSON") from None


def checked_turns(messages: Sequence[Message]) -> Sequence[Mapping[str, Any]]:
    """Return the messages as mappings with role and content. Raises `InputError` for what is no message."""
    try:
        return plain_messages(messages)
    except InputError as error:
        raise InputError(blamed("messages", str(error))) from None
    except Exception as error:
        raise InputError(f"messages cannot be read ({kind_of(error)})") from None


def _role(message: Mapping[str, Any]) -> str:
    return readable(" ".join(str(message.get("role", "user")).split())[:_LONGEST_ROLE_CHARS])


def _turn_text(message: Mapping[str, Any]) -> str:
    return readable(text_of(message.get("content"), message.get("tool_calls")))


@dataclass(frozen=True, slots=True)
class ShownImages:
    """The images of a sample: by the name of each ("image 1 of the prompt"), the part of a message that holds it.
    `messages` are those of its prompt, with a name in the place of each image.
    """

    messages: Sequence[Message]
    images: Mapping[str, Mapping[str, Any]]

    def parts(self) -> Iterator[dict[str, Any]]:
        """Yield the content parts that show the images, each below its name."""
        for name, part in self.images.items():
            yield {"type": "text", "text": f"{name[0].upper()}{name[1:]}:"}
            yield dict(part)


def has_images(sample: Sample) -> bool:
    """Whether a sample has an image, in its prompt or its response."""
    return bool(sample.response_images or _images_in(sample.messages))


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


class ImageRules:
    """Which images a judge sends, and to which of its sources: those whose models read images."""

    def __init__(self, judge: str, limits: ImageLimits, opening: Opening) -> None:
        configured = opening.config.sources
        self._judge = judge
        self._where = f"judges.{judge}.images"
        self._limits = limits
        self._sources = tuple(name for name in opening.sources if getattr(configured.get(name), "vision", False))
        self.sends = bool(self._sources)
        self._warned = False

    def mistakes(self) -> list[Mistake]:
        """Return the mistakes of a judge that sends images without Pillow, or from a folder that does not exist."""
        mistakes: list[Mistake] = []
        folder = self._limits.folder
        if folder is not None and not Path(folder).expanduser().is_dir():
            remedy = "Name the folder of the images, or leave it out."
            mistakes.append(Mistake(f"{self._where}.folder", f"there is no folder {folder!r}.", remedy))
        if self.sends and not has_pillow():
            mistakes.append(Mistake(self._where, "images need Pillow, which is not installed.", f"Run `{EXTRA}`."))
        return mistakes

    def sent(self, sample: Sample) -> bool:
        """Whether the sample has images that are sent. Warns once of a judge that does not send images."""
        if self._warned or not has_images(sample):
            return False
        if not self.sends:
            self._warned = True
            _log.warning(
                "A sample has images, and judge %s does not see them, because none of its sources has `vision: true`. "
                "Set it at a source whose model reads images.",
                self._judge,
            )
        return self.sends

    def call(self, call: Call[Verdict], sample: Sample) -> Call[Verdict]:
        """Return the call of a sample. One with images goes only to sources that read them."""
        if not self.sent(sample):
            return call
        # What a URL leads to may change, so the answer is not used again.
        has_urls = any(remote_url(part) is not None for part in _images_in(sample.messages))
        return replace(call, sources=self._sources, identity="" if has_urls else call.identity)

    def of(self, sample: Sample) -> ShownImages:
        """Return the images of a sample.

        Raises `InputError` for too many images, and for an image that is broken, animated, too large, or not given
        itself.
        """
        count, most = len(_images_in(sample.messages)) + len(sample.response_images), self._limits.max_count
        if count > most:
            raise InputError(f"the sample has {count:,} images, but {self._where}.max_count is {most:,}")
        images: dict[str, dict[str, Any]] = {}

        def shown(part: Any) -> dict[str, Any]:
            name = f"image {len(images) + 1} of the prompt"
            images[name] = self._part(part, name)
            return {"type": "text", "text": f"[{name}]"}

        messages: list[Any] = []
        for message in sample.messages:
            if _images_in([message]):
                content: Sequence[Any] = message["content"]
                parts = [shown(part) if is_image_part(part) else part for part in content]
                messages.append({**message, "content": parts})
            else:
                messages.append(message)
        for number, image in enumerate(sample.response_images, start=1):
            name = f"image {number} of the response"
            images[name] = self._part(image, name)
        return ShownImages(messages, images)

    def _part(self, value: Any, name: str) -> dict[str, Any]:
        """Raises `InputError` for a value that is no image, and for a URL unless the limits allow it."""
        limits, url = self._limits, remote_url(value)
        if url is not None:
            if not limits.allow_urls:
                raise InputError(
                    f"{name} is a URL, and images are not fetched; give the image itself, or set "
                    f"{self._where}.allow_urls to let the server fetch it"
                )
            return {"type": "image_url", "image_url": {"url": url}}
        with named(name):
            image = Image.of(value, folder=limits.folder)
        encoded = EncodedImage(image, name=name, max_side=limits.max_side, max_bytes=limits.max_bytes)
        return {"type": "image_url", "image_url": {"url": encoded}}
