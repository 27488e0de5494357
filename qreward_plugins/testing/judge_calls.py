"""The requests of a judge server as its scorer gets them, and what becomes of the scorer's answers.

Tokens are counted by a simple rule (UTF-8 bytes by four, rounded up), so that tests can predict usage exactly.
"""

from __future__ import annotations

import hashlib
import json
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import orjson

from ..judges.fence import read_fences

Answer = float | Mapping[str, object] | str
"""What a scorer returns: a score, the fields of a verdict, or the content of the message (the body of a reply to a
scoring request) as it is."""

OTHER_MODEL = "somebody-else"
RATIONALE = "scored by the judge server"


def count_tokens(text: str) -> int:
    """The tokens of a text, as the server counts them: its UTF-8 bytes by four, rounded up."""
    return -(-len(text.encode("utf-8", "surrogatepass")) // 4)


@dataclass(frozen=True)
class JudgeCall:
    """A chat completion request, as the scorer gets it. A scoring request is a `ScoreCall`."""

    model: str
    messages: Sequence[Mapping[str, object]]
    parameters: Mapping[str, object] = field(default_factory=dict)
    """The other fields of the request's body: temperature, max_tokens, response_format, ..."""

    @cached_property
    def prompt(self) -> str:
        """The text of the last user message, or ""."""
        for message in reversed(self.messages):
            if message.get("role") == "user":
                return text_of(message.get("content"))
        return ""

    @cached_property
    def _fences(self) -> tuple[str | None, Mapping[str, str]]:
        return read_fences(self.prompt)

    @property
    def nonce(self) -> str | None:
        """The identifier in the fences of the last user message; None without fences."""
        return self._fences[0]

    @property
    def blocks(self) -> Mapping[str, str]:
        """The fenced blocks of the last user message by label: question, response, reference, ..."""
        return self._fences[1]

    @property
    def score_range(self) -> tuple[float, float]:
        """The requested score range: that of the schema of `response_format` or of the form, else 0 to 1."""
        if self.form is not None and self.form["low"]:
            return float(self.form["low"]), float(self.form["high"])
        node = _below(self.schema, "properties", "score")
        low, high = (node.get("minimum"), node.get("maximum")) if isinstance(node, Mapping) else (None, None)
        if isinstance(low, (int, float)) and isinstance(high, (int, float)):
            return float(low), float(high)
        return 0.0, 1.0

    @property
    def criteria(self) -> tuple[str, ...]:
        """The requested components: those in the schema of `response_format`."""
        components = _below(self.schema, "properties", "components", "properties")
        return tuple(components) if isinstance(components, Mapping) else ()

    @cached_property
    def form(self) -> re.Match[str] | None:
        """The form of the answer at the end of the prompt, if it is not JSON: its signs, and the `labels` or the `low`
        and the `high` end.
        """
        return _FORM.search(self.prompt)

    @property
    def labels(self) -> list[str]:
        """The labels of which the request asks for one."""
        if self.form is not None and self.form["labels"]:
            return [str(label) for label in json.loads(f"[{self.form['labels']}]")]
        labels = _below(self.schema, "properties", "label", "enum")
        return labels if isinstance(labels, list) else []

    @property
    def schema(self) -> object:
        """The JSON schema of `response_format`; None if there is none."""
        return _below(self.parameters.get("response_format"), "json_schema", "schema")

    @cached_property
    def prompt_tokens(self) -> int:
        """Tokens of the texts of all messages, by `count_tokens` over them all."""
        return count_tokens("".join(text_of(message.get("content")) for message in self.messages))

    @property
    def max_tokens(self) -> int | None:
        """The most tokens the completion may have, None for no limit."""
        value = self.parameters.get("max_completion_tokens", self.parameters.get("max_tokens"))
        return value if isinstance(value, int) else None


@dataclass(frozen=True)
class ScoreCall(JudgeCall):
    """A scoring request, as the scorer gets it: a `JudgeCall` with the blocks `question` (the prompt's text),
    `response` and, if there is a label, `reference`.

    `messages` is the prompt, `parameters` has the further keys of the body. There is no nonce, and the score range is 0
    to 1.
    """

    response: str = ""
    label: object = None

    @cached_property
    def _fences(self) -> tuple[str | None, Mapping[str, str]]:
        blocks = {"question": self.prompt, "response": self.response}
        if self.label is not None:
            blocks["reference"] = self.label if isinstance(self.label, str) else json.dumps(self.label)
        return None, blocks

    @property
    def score_range(self) -> tuple[float, float]:
        return 0.0, 1.0

    @cached_property
    def prompt_tokens(self) -> int:
        """Tokens of the texts of the prompt, the response and a label that is a text, by `count_tokens` over all."""
        prompt = [text_of(message.get("content")) for message in self.messages]
        label = self.label if isinstance(self.label, str) else ""
        return count_tokens("".join((*prompt, self.response, label)))


_FORM = re.compile(
    r"\n(?P<opens><\w+>|\\boxed\{|)(?:one of (?P<labels>\".*\")|number from (?P<low>\S+) to (?P<high>[^\s<}]+))"
    r"(?P<closes></\w+>|\}|)\Z"
)


def _below(node: object, *keys: str) -> object:
    """The value at this path of keys; None if there is none."""
    for key in keys:
        node = node.get(key) if isinstance(node, Mapping) else None
    return node


class Refused(Exception):
    """The server refuses this request, because of the client's mistake."""

    def __init__(self, status: int, message: str, code: str | None = None) -> None:
        super().__init__(message)
        self.status = status
        self.code = code


def read_object(body: bytes) -> dict[str, Any]:
    """Read a body. Raises `Refused` if it is no JSON object."""
    try:
        fields = orjson.loads(body)
    except orjson.JSONDecodeError:
        raise Refused(400, "the body is not valid JSON") from None
    if not isinstance(fields, dict):
        raise Refused(400, "the body must be a JSON object")
    return fields


def check_messages(messages: Sequence[object]) -> None:
    """Raise `Refused` if one of these is no message."""
    for message in messages:
        if not isinstance(message, dict) or not isinstance(message.get("role"), str):
            raise Refused(400, "every message must be an object with a role")
        if not isinstance(message.get("content"), (str, list, type(None))):
            raise Refused(400, "the content of a message must be a string or a list of parts")


def overlap_score(call: JudgeCall) -> float:
    """The built-in scorer: deterministic, and plausible enough for a demo and for `qreward check`.

    With a reference: the share of its distinct words that the response contains. Without: nine tenths are the share of
    the question's words, because an answer takes them up and nonsense does not, and one tenth depends only on the
    response, so that few responses have equal scores. A text without a question, such as the rendered conversation that
    a reward model gets, is divided where the assistant's turn begins; if it has none, the score depends only on the
    text. The score is in the requested range, rounded to three digits; each criterion gets the same.
    """
    question, response = call.blocks.get("question", ""), call.blocks.get("response", call.prompt)
    wanted = _words(call.blocks.get("reference", ""))
    if wanted:
        share = len(wanted & _words(response)) / len(wanted)
    else:
        if not question:
            question, response = _divided(response)
        digest = hashlib.blake2b(response.encode("utf-8", "surrogatepass"), digest_size=8).digest()
        share = int.from_bytes(digest, "big") / 2**64
        asked = _words(question)
        if asked:
            share = 0.9 * len(asked & _words(response)) / len(asked) + 0.1 * share
    low, high = call.score_range
    return round(low + share * (high - low), 3)


_TURN = re.compile(r"<\|?\w+\|?>(?:assistant|model)\b|\[/INST\]|\bassistant:", re.I)
"""Where the assistant's turn begins, in the chat templates of Qwen, Llama, Gemma and Mistral, and in plain ones."""


def _divided(text: str) -> tuple[str, str]:
    """A rendered conversation, as what precedes the assistant's last turn, and this turn; ("", text) if it has none."""
    turns = list(_TURN.finditer(text))
    return (text[: turns[-1].start()], text[turns[-1].end() :]) if turns else ("", text)


def _words(text: str) -> set[str]:
    return set(re.findall(r"\w+", text.lower()))


def listed(call: JudgeCall) -> Sequence[JudgeCall]:
    """The calls that would ask about each response of a list by itself; empty for a call about one response."""
    scores = _below(call.schema, "properties", "scores", "properties")
    found = []
    for number in scores if isinstance(scores, Mapping) else ():
        each = replace(call)
        blocks = {**call.blocks, "response": call.blocks.get(f"response_{number}", "")}
        # In the place of the cached property.
        each.__dict__["_fences"] = (call.nonce, blocks)
        found.append(each)
    return found


def list_answer(answers: Sequence[Answer]) -> Answer:
    """The answer about a list, from those about its responses. One that is no number is the answer about all."""
    for answer in answers:
        if not isinstance(answer, (int, float)):
            return answer
    return {"scores": {str(number): answer for number, answer in enumerate(answers, 1)}, "rationale": RATIONALE}


def as_verdict(call: JudgeCall, answer: Answer) -> dict[str, object] | str:
    """The verdict for a scorer's answer, its id first, or the text that is sent unchanged.

    A number is the score, and also every component that the request asks for. Where the request asks for a label, or
    for criteria that are met, it is the share of the way from the last label to the first one, or of the criteria. A
    mapping is used as it is, so components that it omits are missing. In a form that is not JSON, the value stands in
    it.

    Raises `TypeError` for an answer of another type. NaN and infinity pass, because some judges send them.
    """
    verdict: dict[str, object] = {} if call.nonce is None else {"id": call.nonce}
    if isinstance(answer, str):
        return answer
    if call.form is not None:
        return _in_form(call, call.form, answer)
    if isinstance(answer, Mapping):
        return verdict | dict(answer)
    if isinstance(answer, (int, float)) and not isinstance(answer, bool):
        components = {"components": dict.fromkeys(call.criteria, answer)} if call.criteria else {}
        return verdict | _asked_for(call, answer) | {"rationale": RATIONALE, **components}
    raise TypeError(f"the scorer returned {type(answer).__name__}: return a float, a mapping or a str")


def _in_form(call: JudgeCall, form: re.Match[str], answer: Mapping[str, object] | float) -> str:
    fields = answer if isinstance(answer, Mapping) else _asked_for(call, float(answer))
    value = fields.get("label", fields.get("score"))
    reason = "" if call.parameters.get("logprobs") else f"{fields.get('rationale', RATIONALE)} "
    return f"{reason}{form['opens']}{value}{form['closes']}"


def _asked_for(call: JudgeCall, score: float) -> dict[str, object]:
    labels = call.labels
    criteria = _below(call.schema, "properties", "criteria", "properties")
    if labels:
        return {"label": labels[round((1.0 - min(max(score, 0.0), 1.0)) * (len(labels) - 1))]}
    if isinstance(criteria, Mapping):
        met = {name: number < score * len(criteria) for number, name in enumerate(criteria)}
        quote = (call.blocks.get("response", "").split() or [""])[0]
        quoted = any(isinstance(each, Mapping) and "properties" in each for each in criteria.values())
        return {"criteria": {name: {"quote": quote, "met": each} for name, each in met.items()} if quoted else met}
    return {"score": score}


def dump_verdict(verdict: object) -> str:
    """The verdict as JSON, with `NaN` and `Infinity` where there are any (orjson would make them null)."""
    return json.dumps(verdict, ensure_ascii=False)


@dataclass(frozen=True)
class Completion:
    """The one choice of a chat completion."""

    content: str | None
    finish_reason: str = "stop"
    refusal: str | None = None

    @property
    def tokens(self) -> int:
        return count_tokens(self.content or self.refusal or "")

    def cut(self, max_tokens: int | None) -> Completion:
        """The completion with at most this many tokens. A longer one is truncated, with `finish_reason` "length"."""
        if max_tokens is None or self.content is None or self.tokens <= max_tokens:
            return self
        kept = self.content.encode("utf-8", "surrogatepass")[: 4 * max_tokens].decode("utf-8", "ignore")
        return Completion(kept, "length", self.refusal)


@dataclass(frozen=True)
class JudgeReply:
    """The body of a good reply as data, and what faults make of it."""

    fields: Any
    """The body as data: a mapping, or a list. No prefix of its JSON is a valid reply."""
    tokens: int = 0
    """Tokens of the completion."""
    text: str | None = None
    """The body, if it is not `fields` as JSON."""

    @property
    def good(self) -> bytes:
        return self.cuttable if self.text is None else self.text.encode("utf-8", "surrogatepass")

    @property
    def cuttable(self) -> bytes:
        """A good body of which no prefix is a valid reply."""
        return _dumped(self.fields)

    @property
    def without_answer(self) -> bytes:
        """A body whose lists are empty; one without lists is empty."""
        if isinstance(self.fields, list):
            return b"[]"
        lists = [key for key, value in self.fields.items() if isinstance(value, list)]
        return _dumped({**self.fields, **{key: [] for key in lists}} if lists else {})

    @property
    def of_another_model(self) -> bytes:
        if isinstance(self.fields, list):
            return self.cuttable
        key = "modelVersion" if "modelVersion" in self.fields else "model"
        return _dumped({**self.fields, key: OTHER_MODEL})

    @property
    def invalid_utf8(self) -> bytes:
        whole = self.cuttable
        return whole[:-1] + (b', "note": "\xff\xfe"}' if whole.endswith(b"}") else b', "\xff\xfe"]')

    @property
    def around(self) -> tuple[bytes, bytes]:
        """The two ends of a body that is valid JSON with any filler between them."""
        whole = self.cuttable
        head = b'{"filler": "' if whole.startswith(b"{") else b'["'
        return head, (b'", ' if len(whole) > 2 else b'"') + whole[1:]


def _dumped(fields: Any) -> bytes:
    """JSON with `NaN` and `Infinity`, which some servers send."""
    return json.dumps(fields, ensure_ascii=False, separators=(",", ":")).encode("utf-8", "surrogatepass")


_ERROR_TYPES = {401: "authentication_error", 403: "permission_error", 429: "rate_limit_error", 529: "overloaded_error"}


def error_body(status: int, message: str, code: str | None = None) -> dict[str, object]:
    """An error in the shape OpenAI-compatible servers use."""
    kind = _ERROR_TYPES.get(status, "server_error" if status >= 500 else "invalid_request_error")
    return {"error": {"message": message, "type": kind, "param": None, "code": code}}


def duration(seconds: float) -> str:
    """A duration in the form of `x-ratelimit-reset-*`: "20ms", "1.5s", "6m0s". Rounded up to the millisecond."""
    milliseconds = max(0, math.ceil(seconds * 1000 - 1e-6))
    if milliseconds < 1000:
        return f"{milliseconds}ms"
    minutes, rest = divmod(milliseconds, 60_000)
    return f"{minutes}m{rest / 1000:g}s" if minutes else f"{rest / 1000:g}s"


def text_of(content: object) -> str:
    """The text of a message's content; its parts are joined."""
    if isinstance(content, str):
        return content
    if isinstance(content, list):
        parts = (part.get("text") for part in content if isinstance(part, dict))
        return "".join(text for text in parts if isinstance(text, str))
    return ""
