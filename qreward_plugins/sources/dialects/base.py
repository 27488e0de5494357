"""Defines `Dialect`: one wire format of chat servers, and what all formats share."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from ...quotas.tokens import of_messages
from ...samples.images import EncodedImage
from ..base import Request
from ..replies import Answer
from ..streams import StreamReader

NO_EFFORT = "none"
"""The effort that turns reasoning off in OpenAI's formats."""


@dataclass(frozen=True, slots=True)
class Refusal:
    """A setting that a dialect cannot send. `key` is its path in `parameters`, or the name of a judge's parameter."""

    key: str
    problem: str
    remedy: str = ""


class Dialect(ABC):
    """How requests are written and replies are read in one wire format. Has no state.

    A judge writes requests in the words of OpenAI's chat completions: messages, `max_tokens`, `temperature`, `seed`,
    `response_format`, `logprobs`. `body` translates them.
    """

    name: ClassVar[str]
    """Its name in the configuration."""
    path: ClassVar[str]
    """What is appended to the URL. `{model}` stands for the model."""
    key_header: ClassVar[tuple[str, str]] = ("Authorization", "Bearer ")
    """The name of the header that carries the key, and the text before the key in its value."""
    headers: ClassVar[Mapping[str, str]] = {}
    """Further headers. Headers of the configuration override them."""
    answer: ClassVar[type[Answer]]
    """The class that reads a reply."""
    stream: ClassVar[type[StreamReader]]
    """The class that reads a streamed reply."""
    stream_path: ClassVar[str | None] = None
    """What is appended to the URL for a streamed reply, if that is another path."""
    bound: ClassVar[tuple[str, ...]]
    """The path of the key in the body that bounds a completion."""
    bound_holds_budget: ClassVar[bool] = True
    """Whether a thinking budget counts within that bound. False: it is added, because some servers do."""
    prompt_keys: ClassVar[tuple[str, ...]]
    """The keys of the body that hold the prompt, and that `parameters` must not have."""
    containers: ClassVar[tuple[str, ...]] = ()
    """The keys of the body that hold several settings: `parameters` change single settings in them."""
    answers_in: ClassVar[str]
    """The key of a reply that holds the list of answers, or of their parts."""
    sends_temperature: ClassVar[bool] = True
    """Whether a judge's temperature is sent. False: current models of this dialect refuse it."""
    lacks: ClassVar[tuple[str, ...]] = ()
    """Parameters of judges that it cannot express. The value `json_object` of `response_format` is one of its own."""

    @abstractmethod
    def body(self, model: str, request: Request, parameters: dict[str, Any]) -> dict[str, Any]:
        """Return the body of a request, before the configured parameters. `parameters` are a copy of the judge's.
        Change nothing inside of a value: all requests share it.
        """

    @abstractmethod
    def prompt(self, body: dict[str, Any]) -> tuple[list[str], int, int]:
        """Remove the prompt from a body. Return its texts, the tokens of its images, and those of the chat template and
        of other parts.
        """

    def thinks(self, parameters: Mapping[str, Any]) -> bool:
        """Whether the model thinks before it answers, as far as the configured parameters tell."""
        return True

    def refusals(self, parameters: Mapping[str, Any]) -> list[Refusal]:
        """Return the configured parameters that would replace the prompt, or the settings of a judge. What else a
        server does not take, it says itself.
        """
        found = [Refusal(key, "the judge writes it.", "Leave it out.") for key in self.prompt_keys if key in parameters]
        for key in self.containers:
            if parameters.get(key) is not None and not isinstance(parameters[key], Mapping):
                found.append(Refusal(key, "it is a mapping of settings."))
        return found

    def holds_answer(self, content: Mapping[str, Any]) -> bool:
        """Whether a body is a reply of this format, whatever it says."""
        return isinstance(content.get(self.answers_in), list)

    def unmet(self, asked: Mapping[str, Any], parameters: Mapping[str, Any]) -> list[Refusal]:
        """Return the parameters of a judge that would not be sent. Configured parameters replace those of the judge, so
        a key that they set or remove is not missed.
        """
        found: list[Refusal] = []
        for name, value in asked.items():
            if value is None or value is False or name in parameters:
                continue
            is_object = isinstance(value, Mapping) and value.get("type") == "json_object"
            lacking = "json_object" if is_object else name
            if lacking in self.lacks:
                found.append(Refusal(name, f"the dialect {self.name} has no {lacking}."))
        if not self.sends_temperature and asked.get("temperature") and "temperature" not in parameters:
            found.append(
                Refusal(
                    "temperature",
                    f"the dialect {self.name} does not send it, because current models refuse it.",
                    "Leave it out, or name it in the source's parameters: a number sends it, null removes it.",
                )
            )
        return found

    def identity(self, model: str) -> object:
        """What the body does not hold and changes the answer, for the journal's key."""
        return (self.name, model)


def system_and_turns(messages: Sequence[Mapping[str, Any]]) -> tuple[str, list[Mapping[str, Any]]]:
    """Split chat messages into the text of all system messages and the other turns."""
    system = [text_of(message["content"]) for message in messages if message["role"] in ("system", "developer")]
    turns = [message for message in messages if message["role"] not in ("system", "developer")]
    return "\n\n".join(text for text in system if text), turns


def parts_of(content: Any) -> list[tuple[str, Any]]:
    """Return the parts of a message's content: ("text", text), ("image", the URL or `EncodedImage`), or ("other", the
    part itself).
    """
    if isinstance(content, str):
        return [("text", content)]
    return [_part(part) for part in content or ()]


def written_parts(
    content: Any, text: Callable[[str], dict[str, Any]], image: Callable[[str | EncodedImage], dict[str, Any]]
) -> list[Any]:
    """Return the parts of a message's content as a dialect writes them: by `text` and `image`, others as they are."""
    write: Mapping[str, Callable[[Any], Any]] = {"text": text, "image": image}
    return [write[kind](value) if kind in write else value for kind, value in parts_of(content)]


def text_of(content: Any) -> str:
    """Return the text of a message's content."""
    return "".join(value for kind, value in parts_of(content) if kind == "text")


def image_data(image: str | EncodedImage) -> tuple[str, str | EncodedImage] | None:
    """Return the media type and the base64 of an image that is sent itself; None for one that is sent as an address."""
    if isinstance(image, EncodedImage):
        return image.media_type, image.as_base64()
    head, comma, data = image.partition(",")
    if not comma or not head.startswith("data:") or not head.endswith(";base64"):
        return None
    return head.removeprefix("data:").removesuffix(";base64").partition(";")[0], data


def prompt_in(turns: Any, system: Any, *, blocks: str) -> tuple[list[str], int, int]:
    """Return the texts of a prompt, the tokens of its images, and those of its template and of other parts.

    `blocks` is the key of a turn's blocks; `system` is a text or a list of blocks.
    """
    contents = [system, *(turn.get(blocks) for turn in turns if isinstance(turn, Mapping))]
    return of_messages([{"content": content} for content in contents if content is not None])


def schema_in(response_format: Any) -> Mapping[str, Any] | None:
    """Return the JSON schema of a chat completion's `response_format`; None if it has none."""
    named = response_format.get("json_schema") if isinstance(response_format, Mapping) else None
    schema = named.get("schema") if isinstance(named, Mapping) else None
    return schema if isinstance(schema, Mapping) else None


def is_on(value: Any) -> bool:
    """Whether a setting of thinking (`thinking`, `reasoning`) turns it on."""
    if isinstance(value, Mapping):
        kind, effort = value.get("type", "enabled"), value.get("effort")
        if kind in ("disabled", "between_tools") or effort == NO_EFFORT:
            return False
        return bool(value.get("enabled", True))
    return bool(value)


def _part(part: Any) -> tuple[str, Any]:
    if isinstance(part, str):
        return "text", part
    if isinstance(part, Mapping):
        if isinstance(part.get("text"), str):
            return "text", part["text"]
        image = part.get("image_url")
        url = image.get("url") if isinstance(image, Mapping) else image
        if isinstance(url, (str, EncodedImage)):
            return "image", url
    return "other", part
