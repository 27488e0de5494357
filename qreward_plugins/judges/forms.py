"""The form in which a judge writes its answer: one JSON object, one value between tags or in a box, or one word whose
log probabilities are read.

Only JSON carries the nonce of the call, so only there a verdict that the judge copied from the response is told from
its own. The other forms are for judges that were trained to answer in them, and for small ones. Instead, the prompt
rewrites whatever looks like a verdict in the sample (`hidden`), so a verbatim copy is not read as one. The rest is as
strict: one match, which ends the reply, and after the thoughts of the judge.
"""

from __future__ import annotations

import math
import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, model_validator

from ..config.nodes import Node, no_bool
from ..errors import InvalidReply
from ..samples import RawScore
from ..sources.base import Reply
from .fence import readable
from .tasks import LabelTask, Task
from .verdicts import MAX_RATIONALE_CHARS, ParsedVerdict, excerpt, hides_marks, marks_in, parse_verdict, within

ReadAnswer = Callable[[Mapping[str, Any], str], RawScore]
"""Reads the fields of an answer; the second argument is its text, for messages. Raises `InvalidReply`."""

TOP_LOGPROBS = 20
"""Most likely tokens that are asked for: the most that OpenAI, Gemini and vLLM give."""
LABEL_TOKENS = 4
"""Longest completion of the form `logprobs`: the label may follow a token that is white space."""

_NUMBER = re.compile(r"[-+]?[0-9]{1,30}(?:\.[0-9]{1,30})?(?:[eE][-+]?[0-9]{1,2})?")
_BOX = re.compile(r"\\boxed\{(?:\\text\{([^{}]*)\}|([^{}]*))\}(?:[\s.$*]|\\[\])])*")
"""A box and what LaTeX and Markdown put behind it."""


class Read(Node):
    """The form of the judge's answer."""

    form: Literal["json", "tagged", "boxed", "logprobs"] = "json"
    """`json` (default): one JSON object with the id of the call. `tagged`: one value between tags, at the end. `boxed`:
    one value in `\\boxed{...}`, at the end. `logprobs`: one of the labels, and its reward is the mean of the labels'
    rewards, weighted by the probabilities of their first tokens. A value is a score without criteria, or a label.
    """

    tag: Annotated[str, Field(pattern=r"^[a-z][a-z0-9_]*$", max_length=40)] = "verdict"
    """The name of the tags, for `tagged`. Default: `verdict`."""

    min_mass: Annotated[float, Field(gt=0, le=1), BeforeValidator(no_bool)] = 0.5
    """Least probability that the labels have together, for `logprobs`; with less, the reply is invalid. Default: 0.5.
    """

    @model_validator(mode="after")
    def _has_details_of_its_form(self) -> Read:
        for form, key in (("tagged", "tag"), ("logprobs", "min_mass")):
            if self.form != form and getattr(self, key) != type(self).model_fields[key].default:
                raise ValueError(f"`{key}` is for `form: {form}`, not for `{self.form}`")
        return self


class AnswerForm(ABC):
    """How the judge is told to answer, what is asked of the server for it, and how the answer is read."""

    hidden: Mapping[str, str] = {}
    """Signs of the form, and how texts of the sample are shown that hold them."""
    identity: tuple[Any, ...] = ()
    """All that changes which numbers are read, besides the task."""
    max_tokens: int | None = None
    """Longest completion in tokens, if the form bounds it."""

    def __init__(self, task: Task) -> None:
        self._task = task

    @abstractmethod
    def told(self, count: int) -> str:
        """The end of the prompt, with the word `NONCE` instead of the nonce. `count` is that of the task."""

    def parameters(self, count: int) -> Mapping[str, Any]:
        """What it adds to the parameters of a request. Default: nothing."""
        return {}

    @abstractmethod
    def read(self, reply: Reply, *, nonce: str, read: ReadAnswer, max_chars: int) -> ParsedVerdict:
        """Read a reply. Raises `InvalidReply` unless it has exactly one whole answer."""


class JSONForm(AnswerForm):
    """One JSON object with the id of the call."""

    def __init__(self, task: Task, response_format: str) -> None:
        super().__init__(task)
        self._response_format = response_format

    def told(self, count: int) -> str:
        return self._task.form(count)

    def parameters(self, count: int) -> Mapping[str, Any]:
        if self._response_format == "none":
            return {}
        if self._response_format == "json_object":
            return {"response_format": {"type": "json_object"}}
        # Servers compile and cache a grammar for each schema, so a schema with the nonce would cost a compilation for
        # each call. Our parser checks the nonce.
        schema = {"name": "verdict", "strict": True, "schema": self._task.schema(count)}
        return {"response_format": {"type": "json_schema", "json_schema": schema}}

    def read(self, reply: Reply, *, nonce: str, read: ReadAnswer, max_chars: int) -> ParsedVerdict:
        return parse_verdict(reply.text, nonce=nonce, read=read, max_chars=max_chars)


class _ValueForm(AnswerForm):
    """One value at the end of a text."""

    opens: str
    closes: str

    def __init__(self, task: Task) -> None:
        super().__init__(task)
        written, schema = task.fields(0)[task.single]
        self._is_number = schema["type"] == "number"
        self._meant = written[1:-1]

    def told(self, count: int) -> str:
        return (
            "Give your reasons in one or two sentences. Then end with your verdict, once, in exactly this form, and "
            f"with nothing after it:\n{self.opens}{self._meant}{self.closes}"
        )

    def read(self, reply: Reply, *, nonce: str, read: ReadAnswer, max_chars: int) -> ParsedVerdict:
        answer = _after_thoughts(within(reply.text, max_chars))
        before, value = self._found(answer)
        if self._is_number and not _NUMBER.fullmatch(value):
            raise InvalidReply(f"the verdict is no number: {excerpt(value)}")
        found: Any = float(value) if self._is_number else value
        return ParsedVerdict(read({self._task.single: found}, answer), readable(before).strip()[:MAX_RATIONALE_CHARS])

    @abstractmethod
    def _found(self, answer: str) -> tuple[str, str]:
        """The text before the one verdict, and its value. Raises `InvalidReply`."""

    def holds(self, label: str) -> bool:
        """Whether a label can be read."""
        try:
            return self._found(_after_thoughts(f"{self.opens}{label}{self.closes}"))[1] == label
        except InvalidReply:
            return False

    def _once(self, answer: str, *signs: str) -> None:
        """Raise `InvalidReply` unless each of the signs occurs once."""
        count = max(answer.count(sign) for sign in signs)
        if count != 1 or not all(sign in answer for sign in signs):
            form = f"{self.opens}...{self.closes}"
            raise InvalidReply(f"the reply holds {count} whole verdicts, not one, as {form}: {excerpt(answer)}")


class TaggedForm(_ValueForm):
    """One value between tags."""

    def __init__(self, task: Task, tag: str) -> None:
        super().__init__(task)
        self.opens, self.closes = f"<{tag}>", f"</{tag}>"
        self.hidden = {self.opens: f"\u2039{tag}\u203a", self.closes: f"\u2039/{tag}\u203a"}
        self.identity = ("tagged", tag)

    def _found(self, answer: str) -> tuple[str, str]:
        self._once(answer, self.opens, self.closes)
        before, _, rest = answer.partition(self.opens)
        value, closes, after = rest.partition(self.closes)
        if not closes or after.strip():
            raise InvalidReply(f"the reply does not end with its verdict: {excerpt((closes and after) or answer)}")
        return before, value.strip()


class BoxedForm(_ValueForm):
    """One value in the box that LaTeX draws around results."""

    opens, closes = "\\boxed{", "}"
    hidden: Mapping[str, str] = {"\\boxed": "\u2216boxed"}
    identity = ("boxed",)

    def told(self, count: int) -> str:
        return f"In these texts \u2216boxed stands for \\boxed.\n\n{super().told(count)}"

    def _found(self, answer: str) -> tuple[str, str]:
        self._once(answer, "\\boxed")
        start = answer.index("\\boxed")
        box = _BOX.fullmatch(answer, start)
        if box is None:
            raise InvalidReply(f"the reply does not end with its verdict in a box: {excerpt(answer[start:])}")
        return answer[:start].rstrip("$ "), (box[2] if box[1] is None else box[1]).strip()


class LogprobsForm(AnswerForm):
    """One of the labels, read as the probabilities of the first token of each.

    A token counts for a label if it begins this label and no other one. So nothing is read of labels whose first token
    is the same; the mass of the others is then too small.
    """

    max_tokens = LABEL_TOKENS

    def __init__(self, task: LabelTask, min_mass: float) -> None:
        super().__init__(task)
        self._labels, self._min_mass = task.labels, min_mass
        self._meant = task.fields(0)["label"][0][1:-1]
        self.identity = ("logprobs", min_mass)

    def told(self, count: int) -> str:
        return f"Answer with nothing but one word, without quotation marks:\n{self._meant}"

    def parameters(self, count: int) -> Mapping[str, Any]:
        return {"logprobs": True, "top_logprobs": TOP_LOGPROBS}

    def holds(self, label: str) -> bool:
        return label == label.strip() and [other for other in self._labels if other.startswith(label)] == [label]

    def read(self, reply: Reply, *, nonce: str, read: ReadAnswer, max_chars: int) -> ParsedVerdict:
        if not reply.logprobs:
            raise InvalidReply("the reply has no log probabilities; its server does not give them")
        likely = next((likely for token, likely in reply.logprobs if token.strip()), ())
        mass = dict.fromkeys(self._labels, 0.0)
        total = 0.0
        for token, logprob in likely:
            if not logprob <= 1e-3:  # NaN, too
                raise InvalidReply(f"the log probability of {excerpt(token)} is {logprob}, which is above 0")
            total += math.exp(logprob)
            begins = [label for label in self._labels if token.strip() and label.startswith(token.strip())]
            if len(begins) == 1:
                mass[begins[0]] += math.exp(logprob)
        found = sum(mass.values())
        if total > 1.01 or found < self._min_mass:
            first = ", ".join(f"{token!r} {math.exp(logprob):.2f}" for token, logprob in likely[:5])
            need = f"need min_mass, {self._min_mass:g}"
            problem = f"the labels have {found:.2f} of the probability ({total:.2f} in all), and {need}"
            raise InvalidReply(f"{problem}; the first token may be {excerpt(first)}")
        shares = {label: each / found for label, each in mass.items()}
        score = sum(share * self._labels[label] for label, share in shares.items())
        low, high = self._task.range
        return ParsedVerdict(RawScore(min(max(score, low), high), shares), "")


def form_of(task: Task, read: Read, response_format: str) -> AnswerForm:
    """The form of a judge's answers. Raises ValueError, with what is wrong, for a task that it cannot hold."""
    if read.form == "json":
        return JSONForm(task, response_format)
    if read.form == "logprobs":
        if not isinstance(task, LabelTask):
            raise ValueError("logprobs reads labels only")
        form: LogprobsForm | _ValueForm = LogprobsForm(task, read.min_mass)
    elif not task.single:
        raise ValueError(f"{read.form} holds one value, but this judge answers several")
    else:
        form = TaggedForm(task, read.tag) if read.form == "tagged" else BoxedForm(task)
    for label in task.labels if isinstance(task, LabelTask) else ():
        if not form.holds(label):
            why = "it begins another label" if read.form == "logprobs" else "it holds signs of the form"
            raise ValueError(f"{read.form} cannot tell the label {label!r}: {why}, or outer white space")
    return form


def _after_thoughts(text: str) -> str:
    """The answer in a reply. Raises `InvalidReply` if the thoughts do not end, or if it is hidden where they end."""
    if hides_marks(text):
        raise InvalidReply(f"the reply disguises where its reasoning ends: {excerpt(text)}")
    marks = marks_in(text)
    if not marks:
        return text.strip()
    if marks[-1].opens:
        raise InvalidReply(f"the reply ends inside its reasoning: {excerpt(text[marks[-1].start :])}")
    return text[marks[-1].end :].strip()
