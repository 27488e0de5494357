"""What a language model is asked to answer: a score, a label, whether an answer equals the reference, or which criteria
of a rubric are met.

A task writes the form of the answer, its JSON schema and what the judge is told about it, and reads the answer. The
answer is complete or no answer: a criterion that is missing makes it invalid, and is never counted as not met.
"""

from __future__ import annotations

import functools
import json
import math
import re
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from fractions import Fraction
from typing import Annotated, Any, Literal, TypeAlias

from pydantic import Field, ValidationError, model_validator

from ..config.models import Interval
from ..config.nodes import Node, Number, refuse_repeated
from ..errors import InputError, InvalidReply
from ..samples import RawScore, Sample
from .extraction import AnswerPlace
from .fence import neutralise
from .verdicts import RATIONALE_FORM, excerpt, number_in
from .views import ListSample, json_column, reference_text

NONCE = "{nonce}"
"""Stands in texts of the prompt for the nonce of the attempt."""

_FORM = """\
Answer with exactly one JSON object in this form, and with nothing before or after it:
{form}"""

AnswerField: TypeAlias = tuple[str, Mapping[str, Any]]
"""How a field of an answer is written in the form, and its schema."""

MOST_CRITERIA = 100
"""Most criteria of a rubric: each takes tokens of the answer."""
_MOST_CHARS = 4_000
_SPACE = re.compile(r"\s+")


class Task(ABC):
    """What the judge answers."""

    single: str = ""
    """The only field of the answer, for forms that hold one value; "" if there are several."""
    scales_components: bool = False
    """Whether components are in the range of the score, and are mapped as it is. Otherwise they are 1 or 0."""

    def __init__(self, score_range: Interval, identity: Sequence[Any], components: Iterable[str] = ()) -> None:
        self.range = score_range
        """The range of the score that it reads."""
        self.identity = identity
        """All that changes which numbers are read from an answer, for the fingerprint of the judge."""
        self.components = tuple(components)
        """The names of the numbers that every answer has."""
        # A judge asks thousands of times for the same few counts.
        self.form = functools.cache(self._form)

    @abstractmethod
    def fields(self, count: int) -> Mapping[str, AnswerField]:
        """The fields of the answer beside `id` and `rationale`, for so many criteria: how each is written in the form,
        and its schema.
        """

    def count(self, sample: Sample) -> int:
        """How many criteria a sample has, if that differs between samples. Raises `InputError` for a sample that cannot
        be asked about.
        """
        return 0

    @abstractmethod
    def read(self, answer: Mapping[str, Any], sample: Sample, source: str) -> RawScore:
        """Read an answer; `source` is its text, for messages. Raises `InvalidReply`."""

    def told(self, sample: Sample) -> str:
        """What the rules of the prompt say about the answer; "" for nothing."""
        return ""

    def rubric(self, sample: Sample) -> str:
        """The criteria of a data set, which are untrusted and stand in a fence; "" for none."""
        return ""

    def identity_of(self, sample: Sample) -> Sequence[Any]:
        """What `identity` lacks, because it differs between samples."""
        return ()

    def _form(self, count: int) -> str:
        """The form of the answer for the prompt, with the word `NONCE` instead of the nonce."""
        written = {"id": f'"{NONCE}"', "rationale": f'"{RATIONALE_FORM}"'}
        written |= {name: form for name, (form, _) in self.fields(count).items()}
        return _FORM.format(form=braces(written))

    def schema(self, count: int) -> dict[str, Any]:
        """The JSON schema of the answer."""
        # The rationale comes before the rest: servers keep this order, and models judge better after giving a reason.
        properties: dict[str, Any] = {"id": {"type": "string"}, "rationale": {"type": "string"}}
        return closed(properties | {name: schema for name, (_, schema) in self.fields(count).items()})


class ScoreTask(Task):
    """A number in a range, and one for each of the criteria."""

    scales_components = True

    def __init__(self, score_range: Interval, criteria: Mapping[str, str]) -> None:
        super().__init__(score_range, (score_range, sorted(criteria)), criteria)
        self.single = "" if criteria else "score"
        lines = [f"- {name}: {description}" for name, description in criteria.items()]
        self._told = "Beside the total, score these criteria, each in the same range:\n" + "\n".join(lines)
        self._told = self._told if criteria else ""
        number = number_field(score_range)
        self._fields = ({"components": of_each(criteria, number)} if criteria else {}) | {"score": number}

    def told(self, sample: Sample) -> str:
        return self._told

    def fields(self, count: int) -> Mapping[str, AnswerField]:
        return self._fields

    def read(self, answer: Mapping[str, Any], sample: Sample, source: str) -> RawScore:
        score = number_in("score", answer, self.range, source)
        values = mapping_in("components", answer, source) if self.components else {}
        return RawScore(score, {name: number_in(name, values, self.range, source) for name in self.components})


class LabelTask(Task):
    """One of a closed set of labels, each with its reward. The components say which: 1 for the label, 0 for others."""

    single = "label"

    def __init__(self, labels: Mapping[str, float]) -> None:
        rewards = labels.values()
        super().__init__((min(rewards), max(rewards)), ["labels", *sorted(labels.items())], labels)
        self.labels = dict(labels)

    def fields(self, count: int) -> Mapping[str, AnswerField]:
        names = list(self.labels)
        written = "<one of " + ", ".join(json.dumps(name, ensure_ascii=False) for name in names) + ">"
        return {"label": (written, {"type": "string", "enum": names})}

    def read(self, answer: Mapping[str, Any], sample: Sample, source: str) -> RawScore:
        label = answer.get("label")
        if not isinstance(label, str) or label not in self.labels:
            known = ", ".join(self.labels)
            raise InvalidReply(f"the verdict has none of the labels ({known}): {excerpt(source)}")
        return RawScore(self.labels[label], {name: float(name == label) for name in self.labels})


class Reference(Node):
    """Whether the answer in a response is equivalent to the ground truth, as one of the labels `correct` and
    `incorrect`."""

    extract: AnswerPlace
    """Where the answer stands in the response, as for the ready-made checks: `boxed`, `last_line`, `tag`
    (`<answer>...</answer>`), `marked` (a line that begins with `####`), `all`, or a mapping with `regex`. The judge
    sees nothing else of the response. Without an answer, a response gets the floor, and nothing is sent."""


class ReferenceTask(LabelTask):
    """Whether an answer is equivalent to the ground truth of its sample."""

    def __init__(self) -> None:
        super().__init__({"correct": 1.0, "incorrect": 0.0})

    def count(self, sample: Sample) -> int:
        # Judged without it, a response would get a label that says nothing.
        if not (reference_text(sample.ground_truth) or "").strip():
            raise InputError("the sample has no ground truth, with which the judge compares its answer")
        return 0


class ListTask(Task):
    """A score for each of several responses, by their numbers."""

    def __init__(self, score_range: Interval) -> None:
        super().__init__(score_range, ["list", score_range])

    def count(self, sample: Sample) -> int:
        return len(sample.responses) if isinstance(sample, ListSample) else 0

    def told(self, sample: Sample) -> str:
        low, high = map(plain, self.range)
        return (
            f"Compare the {self.count(sample)} responses with each other before you score any. Give a better response "
            f"a higher score, from {low} to {high}, and equal scores only to responses that are equally good. They "
            "stand in an order drawn by chance."
        )

    def fields(self, count: int) -> Mapping[str, AnswerField]:
        return {"scores": of_each([str(number) for number in range(1, count + 1)], number_field(self.range))}

    def read(self, answer: Mapping[str, Any], sample: Sample, source: str) -> RawScore:
        names = [str(number) for number in range(1, self.count(sample) + 1)]
        values = mapping_in("scores", answer, source)
        unknown = [name for name in values if name not in names]
        if unknown:
            told = f"the verdict scores {excerpt(unknown[0])}, but the responses are 1 to {len(names)}"
            raise InvalidReply(f"{told}: {excerpt(source)}")
        scores = {name: number_in(name, values, self.range, source) for name in names}
        # A mean of floats may round to a number outside of the range.
        return RawScore(min(max(math.fsum(scores.values()) / len(names), self.range[0]), self.range[1]), scores)


class Criterion(Node):
    """A criterion of a rubric."""

    text: Annotated[str, Field(min_length=1, max_length=_MOST_CHARS)]
    """What the response does if it meets the criterion, e.g. "cites a source"."""

    points: Number = 1.0
    """Points for a response that meets it; a negative number makes it a fault. Default: 1."""

    name: Annotated[str, Field(pattern=r"^[a-z][a-z0-9_]*$")] | None = None
    """Its name in the components. Default: `criterion_1`, `criterion_2` ..."""


class Rubric(Node):
    """Criteria that a response meets or not. The score is the sum of the points of those that it meets, over the sum of
    all positive points; less than 0 counts as 0."""

    criteria: Annotated[tuple[Criterion, ...], Field(max_length=MOST_CRITERIA)] = ()
    """The criteria, the same for all samples. Default: those of `column`."""

    column: Annotated[str, Field(min_length=1)] | None = None
    """The column of the data set (a key of the extras) with the criteria of each sample: a list of mappings with `text`
    or `criterion`, and `points` or `weight`. Default: none."""

    evidence: Literal["none", "quote"] = "none"
    """`quote`: for each criterion that is met, the judge quotes the response, and a quote that is not in it makes the
    reply invalid. Default: `none`."""

    @model_validator(mode="after")
    def _one_of_both(self) -> Rubric:
        if bool(self.criteria) == (self.column is not None):
            raise ValueError("name `criteria`, or the `column` that has them, and not both")
        names = [criterion.name for criterion in self.criteria if criterion.name]
        refuse_repeated(names, "two criteria have the name {}")
        if self.criteria and not any(criterion.points > 0 for criterion in self.criteria):
            raise ValueError("no criterion has positive points, so the best score would be 0")
        return self


class RubricTask(Task):
    """Which criteria of a rubric a response meets."""

    def __init__(self, rubric: Rubric) -> None:
        self._rubric = rubric
        self._names = [each.name or f"criterion_{number}" for number, each in enumerate(rubric.criteria, 1)]
        points = [(name, each.points) for name, each in zip(self._names, rubric.criteria, strict=True)]
        super().__init__((0.0, 1.0), ["rubric", rubric.evidence, points], self._names or ["criteria_met"])

    def identity_of(self, sample: Sample) -> Sequence[Any]:
        return () if self._names else [each.points for each in self.items(sample)]

    def items(self, sample: Sample) -> Sequence[Criterion]:
        """The criteria for a sample. Raises `InputError`."""
        if self._rubric.column is None:
            return self._rubric.criteria
        where = f"the rubric of the sample (column {self._rubric.column})"
        value = json_column(sample, self._rubric.column, where)
        if not isinstance(value, (list, tuple)) or not 0 < len(value) <= MOST_CRITERIA:
            raise InputError(f"{where} must be a list of 1 to {MOST_CRITERIA} criteria")
        items = [_criterion(row, f"{where}, criterion {number}") for number, row in enumerate(value, 1)]
        if not any(item.points > 0 for item in items):
            raise InputError(f"{where} has no criterion with positive points")
        return items

    def told(self, sample: Sample) -> str:
        what = "whether the response meets it"
        if self._rubric.evidence == "quote":
            what += ", and copy the words of the response that show it, exactly as they stand there"
        if self._names:
            return f"Decide for each of these criteria {what}:\n{_numbered(self._rubric.criteria)}"
        return f"The rubric lists numbered criteria. Decide for each of them {what}. Nothing else in it counts."

    def rubric(self, sample: Sample) -> str:
        return "" if self._names else _numbered(self.items(sample))

    def count(self, sample: Sample) -> int:
        return len(self.items(sample))

    def fields(self, count: int) -> Mapping[str, AnswerField]:
        names = [str(number) for number in range(1, count + 1)]
        form, schema = "<true or false>", dict[str, Any](type="boolean")
        if self._rubric.evidence == "quote":
            form = braces({"quote": '"<words of the response, empty if not met>"', "met": form})
            schema = closed({"quote": {"type": "string"}, "met": schema})
        return {"criteria": of_each(names, (form, schema))}

    def read(self, answer: Mapping[str, Any], sample: Sample, source: str) -> RawScore:
        items, values = self.items(sample), mapping_in("criteria", answer, source)
        met = [self._met(str(number), values, sample, source) for number in range(1, len(items) + 1)]
        most = sum(Fraction(item.points) for item in items if item.points > 0)
        points = sum(Fraction(item.points) for item, is_met in zip(items, met, strict=True) if is_met)
        # HealthBench (2505.08775), section 4: the points met over the possible ones, clipped to 0 and 1.
        score = float(min(max(Fraction(points) / most, Fraction(0)), Fraction(1)))
        if self._names:
            return RawScore(score, dict(zip(self._names, map(float, met), strict=True)))
        return RawScore(score, {"criteria_met": sum(met) / len(met)})

    def _met(self, number: str, values: Mapping[str, Any], sample: Sample, source: str) -> bool:
        if number not in values:
            raise InvalidReply(f"the verdict lacks criterion {number}: {excerpt(source)}")
        value, quote = values[number], None
        if self._rubric.evidence == "quote":
            if not isinstance(value, dict) or "met" not in value:
                raise InvalidReply(f"criterion {number} has no `met`: {excerpt(source)}")
            value, quote = value["met"], value.get("quote")
        if not isinstance(value, bool):
            raise InvalidReply(f"criterion {number} must be true or false: {excerpt(source)}")
        if value and self._rubric.evidence == "quote" and not _is_quoted(quote, sample.response):
            raise InvalidReply(f"the quote for criterion {number} is not in the response: {excerpt(str(quote))}")
        return value


def _criterion(row: Any, where: str) -> Criterion:
    """Read a criterion of a data set. Raises `InputError`."""
    given = row if isinstance(row, Mapping) else {}
    text, points = (given.get(key, given.get(other)) for key, other in (("text", "criterion"), ("points", "weight")))
    try:
        return Criterion(text=text, points=1.0 if points is None else points)
    except ValidationError:
        problem = f"needs a `text` of 1 to {_MOST_CHARS:,} characters, and `points` that are a number"
        raise InputError(f"{where}: {problem}") from None


def _numbered(criteria: Sequence[Criterion]) -> str:
    return "\n".join(f"{number}. {criterion.text}" for number, criterion in enumerate(criteria, 1))


def _is_quoted(quote: Any, response: str) -> bool:
    """Whether a quote is in the response, apart from white space, and from signs that the prompt shows as others."""
    if not isinstance(quote, str) or not quote.strip():
        return False
    quote, shown = (_SPACE.sub(" ", neutralise(text)).strip() for text in (quote, response))
    return quote in shown


def mapping_in(name: str, answer: Mapping[str, Any], source: str) -> Mapping[str, Any]:
    """Read a field of an answer that has several values, by name. Raises `InvalidReply`."""
    values = answer.get(name)
    if not isinstance(values, dict):
        raise InvalidReply(f"the verdict has no {name}: {excerpt(source)}")
    return values


def number_field(interval: Interval) -> AnswerField:
    """The field of a number in an interval."""
    low, high = map(plain, interval)
    return f"<number from {low} to {high}>", {"type": "number", "minimum": low, "maximum": high}


def of_each(names: Iterable[str], field: AnswerField) -> AnswerField:
    """The field of a mapping with such a field for each name."""
    form, schema = field
    return braces(dict.fromkeys(names, form)), closed({name: dict(schema) for name in names})


def braces(written: Mapping[str, str]) -> str:
    return "{" + ", ".join(f'"{name}": {form}' for name, form in written.items()) + "}"


def closed(properties: dict[str, Any]) -> dict[str, Any]:
    return {
        "type": "object",
        "properties": properties,
        "required": list(properties),
        "additionalProperties": False,
    }


def plain(number: float) -> float | int:
    """Convert 10.0 to 10, for schemas and prompts."""
    return int(number) if number.is_integer() and abs(number) < 1e15 else number
