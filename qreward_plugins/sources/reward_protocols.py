"""How inference servers of reward models are asked, and how their replies are read.

Servers differ in the path, the body and the place of the numbers, so each protocol is one value of `PROTOCOLS`. All of
them are asked for raw numbers: servers apply a softmax or a sigmoid by default, a softmax over one number is 1 for
every response, and a sigmoid makes good responses equal in float32.

The bodies and replies follow the files of the projects: vLLM 0.32 (`entrypoints/pooling/*/protocol.py`), SGLang
(`managers/io_struct.py`, `openai/protocol.py`), text-embeddings-inference 1.7 (`docs/openapi.json`) and OpenRLHF
(`cli/serve_rm.py`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from ..errors import InvalidReply, QRewardError
from .base import Reply
from .bodies import Lists, in_order, listed, numbered, one, several
from .values import StrictAnswer, is_number

ProtocolName = Literal[
    "vllm_classify",
    "vllm_steps",
    "vllm_score",
    "sglang_classify",
    "tei_predict",
    "openrlhf",
]
MOST_LOGITS = 1000
"""Most numbers of one reply: a reply with more is a vector of an embedding model."""
_LONGEST_LABEL_CHARS = 100


@dataclass(frozen=True)
class Protocol:
    """How servers of one kind are asked for the numbers of one response.

    `form` says what they read. `messages`: the conversation, which the server renders; or its text. `text`: the text of
    the conversation. `pair`: the prompt and the response as two texts. `tokens`: the conversation as token ids.

    `body` makes the body from the name of the model and from what is read. `logits` returns the numbers of a reply,
    each with its label or its position ("0", "1" ...); for `tokens` the numbers of every token. It may raise
    LookupError, TypeError or ValueError.
    """

    path: str
    form: Literal["messages", "text", "pair", "tokens"]
    body: Callable[[str, Mapping[str, Any]], dict[str, Any]]
    logits: Callable[[Any], Sequence[Any]]
    lists: Lists
    """How it takes several responses in one request."""


@dataclass(slots=True, eq=False)
class LogitsAnswer(StrictAnswer):
    """One HTTP reply of a reward model."""

    protocol: Protocol

    def read_content(self, content: Any) -> Reply | QRewardError:
        try:
            numbers = self.protocol.logits(content)
            logits = self._labelled(numbers) if self.protocol.form != "tokens" else {}
        except (LookupError, TypeError, ValueError, AttributeError):
            return InvalidReply(
                f"source {self.name!r} gave no numbers: its reply is not one of POST {self.protocol.path}; check "
                "`protocol`"
            )
        if self.protocol.form == "tokens":
            # Checked with the request, which says which tokens count.
            return self.replied(content, value=numbers)
        if not 0 < len(logits) <= MOST_LOGITS:
            return InvalidReply(
                f"source {self.name!r} gave {len(logits):,} numbers for one response: it is not served as a "
                "reward model"
            )
        wrong = [label for label, logit in logits.items() if not is_number(logit)]
        if wrong:
            return InvalidReply(f"source {self.name!r} gave a logit that is no finite number (label {wrong[0]!r})")
        return self.replied(content, value={label: float(logit) for label, logit in logits.items()})

    def _hint(self, status: int) -> str:
        return f"; check `protocol`, and that {self.url_key} has no path" if status in (404, 405) else ""

    def _labelled(self, pairs: Sequence[tuple[Any, Any]]) -> dict[str, Any]:
        """Return the logits by label. Raises TypeError or ValueError for labels that are no short, distinct texts."""
        # Labels go into messages and into the journal, and a server may echo the key.
        clean = self.redactor.clean or str
        logits = {clean(_label(label)): logit for label, logit in pairs}
        if len(logits) < len(pairs):
            raise ValueError("a label occurs twice")
        return logits


def _input(read: Mapping[str, Any]) -> dict[str, Any]:
    return {"messages": read["messages"]} if "messages" in read else {"input": read["text"]}


def _label(label: Any) -> str:
    if not isinstance(label, str):
        raise TypeError
    if len(label) > _LONGEST_LABEL_CHARS or not label.isprintable():
        raise ValueError
    return label


def _numbered(numbers: Any) -> list[tuple[str, Any]]:
    return [(str(position), number) for position, number in enumerate(listed(numbers))]


def _only(items: Any) -> Any:
    """Return the only item of a list: one response was sent. Raises ValueError for more or none."""
    (item,) = listed(items)
    return item


def _data(content: Any) -> list[tuple[Any, Any]]:
    return numbered(content["data"], lambda item: {"data": [item], "model": content.get("model")})


def _each(content: Any) -> list[tuple[Any, Any]]:
    return in_order(content, lambda item: item)


_RAW = {"use_activation": False}
_ONE_INPUT = Lists({"input": one}, _data)

PROTOCOLS: Mapping[ProtocolName, Protocol] = {
    "vllm_classify": Protocol(
        "/classify",
        "messages",
        lambda model, read: {"model": model, **_input(read), **_RAW},
        lambda content: _numbered(_only(content["data"])["probs"]),
        _ONE_INPUT,
    ),
    "vllm_steps": Protocol(
        "/pooling",
        "tokens",
        lambda model, read: {"model": model, "input": list(read["tokens"]), "task": "token_classify", **_RAW},
        lambda content: listed(_only(content["data"])["data"]),
        _ONE_INPUT,
    ),
    "vllm_score": Protocol(
        "/score",
        "pair",
        lambda model, read: {"model": model, "queries": read["prompt"], "documents": read["response"], **_RAW},
        lambda content: [("0", _only(content["data"])["score"])],
        # The server pairs two lists of the same length.
        Lists({"queries": one, "documents": one}, _data),
    ),
    "sglang_classify": Protocol(
        "/classify",
        "text",
        lambda model, read: {"text": read["text"]},
        lambda content: _numbered((_only(content) if isinstance(content, list) else content)["embedding"]),
        Lists({"text": one}, _each),
    ),
    "tei_predict": Protocol(
        "/predict",
        "text",
        lambda model, read: {"inputs": read["text"], "raw_scores": True},
        lambda content: [
            (each["label"], each["score"]) for each in (_only(content) if isinstance(content[0], list) else content)
        ],
        # A list of two texts would be a pair.
        Lists({"inputs": lambda text: [[text]]}, lambda content: in_order(content, lambda item: [listed(item)])),
    ),
    "openrlhf": Protocol(
        "/get_reward",
        "text",
        lambda model, read: {"query": [read["text"]], "prompts": [read["prompt"]]},
        lambda content: [("0", _only(content["rewards"]))],
        Lists(
            {"query": several, "prompts": several},
            lambda content: in_order(content["rewards"], lambda reward: {"rewards": [reward]}),
        ),
    ),
}
"""`POST /v1/classify` of SGLang is not among them: it always applies a softmax."""
