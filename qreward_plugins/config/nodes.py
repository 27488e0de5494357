"""Defines the base class of all nodes of the configuration, and number types that reject booleans."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, TypeVar

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    FiniteFloat,
    GetCoreSchemaHandler,
    GetJsonSchemaHandler,
    ValidationError,
    ValidationInfo,
)
from pydantic_core import CoreSchema, PydanticCustomError, core_schema

T = TypeVar("T")

_FLOAT32_LIMIT = 2.0**128 - 2.0**103
"""The smallest number that rounds to infinity in float32, the type that trainers use."""


def no_bool(value: Any) -> Any:
    # `requests_per_minute: yes` is a mistake, not 1 request a minute.
    if isinstance(value, bool):
        raise PydanticCustomError("no_number", "must be a number")
    return value


def _held_by_trainers(number: float) -> float:
    if abs(number) >= _FLOAT32_LIMIT:
        raise ValueError("it is infinite in float32, the type that trainers use")
    return number


Number = Annotated[FiniteFloat, BeforeValidator(no_bool), AfterValidator(_held_by_trainers)]
PositiveFloat = Annotated[FiniteFloat, Field(gt=0), BeforeValidator(no_bool)]
NonNegativeFloat = Annotated[FiniteFloat, Field(ge=0), BeforeValidator(no_bool)]
Integer = Annotated[int, BeforeValidator(no_bool)]
PositiveInt = Annotated[int, Field(gt=0), BeforeValidator(no_bool)]


def _flag(value: Any) -> Any:
    # Values of the environment and of command lines are text.
    return _FLAGS.get(value.strip().lower(), value) if isinstance(value, str) else value


_FLAGS = {"true": True, "yes": True, "on": True, "false": False, "no": False, "off": False}
"""What YAML reads as a boolean where it is not in quotes."""

Flag = Annotated[bool, Field(strict=True), BeforeValidator(_flag)]
"""True or false, or the text of one. Numbers are refused, and any other text."""


class Node(BaseModel):
    """A node of the configuration tree."""

    # By default, a validation error of pydantic quotes its input, which may be a secret.
    model_config = ConfigDict(
        extra="forbid", frozen=True, use_attribute_docstrings=True, strict=False, hide_input_in_errors=True
    )


def mapping_or_other(value: Any) -> str:
    """Choose the member of a union by its tag, "mapping" or "other", so that a mistake is told in the words of one."""
    return "mapping" if isinstance(value, (Mapping, BaseModel)) else "other"


def refuse_repeated(names: Sequence[str], problem: str) -> None:
    """Raise `ValueError` if a name is given more than once; `{}` in `problem` stands for it."""
    for name in names:
        if names.count(name) > 1:
            raise ValueError(problem.replace("{}", name))


def one_or_several(value: Any) -> Any:
    """Convert a single text to a tuple of one."""
    return (value,) if isinstance(value, str) else value


Several = Annotated[tuple[T, ...], BeforeValidator(one_or_several)]
"""Texts, or one of them alone."""
OneOrMore = Annotated[tuple[T, ...], Field(min_length=1), BeforeValidator(one_or_several)]
"""One or several, but not none."""


def alone(key: str) -> BeforeValidator:
    """Make a validator that reads a text alone as a mapping with this key."""
    return BeforeValidator(lambda value: {key: value} if isinstance(value, str) else value)


@dataclass(frozen=True)
class takes:
    """Says in words what a value must be, for messages and the documentation: "the name of an environment variable".

    It stands last in an `Annotated`. Mistakes of a part of the value, and those that a validator of ours words itself,
    keep their own words.
    """

    words: str

    def __get_pydantic_core_schema__(self, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        return core_schema.no_info_wrap_validator_function(self._read, handler(source))

    def __get_pydantic_json_schema__(self, schema: CoreSchema, handler: GetJsonSchemaHandler) -> dict[str, Any]:
        return {**handler(schema), "takes": self.words}

    def _read(self, value: Any, read: Callable[[Any], Any]) -> Any:
        try:
            return read(value)
        except ValidationError as error:
            whole = not isinstance(value, (Mapping, list, tuple))
            for mistake in error.errors(include_url=False, include_context=False):
                place = mistake["loc"]
                of_part = not whole and place and not (mistake["type"] == "missing" and isinstance(place[-1], int))
                if of_part or mistake["type"] in WORDED:
                    raise
        raise PydanticCustomError("takes", "must be {words}", {"words": self.words})


WORDED = frozenset({"value_error", "assertion_error", "reference"})
"""Types of pydantic's errors whose words are those of a validator."""


FactoryPath = Annotated[
    str,
    Field(pattern=r"^[^:]+:[A-Za-z_][A-Za-z0-9_.]*$"),
    takes("`package.module:factory` or `path/to/file.py:factory`"),
]
"""Where a function without arguments is."""

PRIORITIES = {"high": 10, "normal": 0, "low": -10}
"""The priorities that have names."""
MOST_PRIORITY = 2**31


def _number_of_priority(value: Any) -> Any:
    return PRIORITIES.get(value, value) if isinstance(value, str) else no_bool(value)


Priority = Annotated[
    int,
    Field(ge=-MOST_PRIORITY, le=MOST_PRIORITY),
    BeforeValidator(_number_of_priority),
    takes("`high`, `normal`, `low`, or a whole number"),
]
"""Which samples go first: `high` (10), `normal` (0), `low` (-10), or a whole number; the highest number goes first."""


class _Name(str):
    """The name of another part of the configuration. `load_config` has a validation context that knows all names."""

    @classmethod
    def __get_pydantic_core_schema__(cls, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        return core_schema.with_info_after_validator_function(cls._known, core_schema.str_schema())

    @classmethod
    def _known(cls, name: str, info: ValidationInfo) -> _Name:
        found: tuple[str, str] | None = info.context.problem_of(cls, name) if info.context is not None else None
        if found is not None:
            raise PydanticCustomError("reference", "{problem}", {"problem": found[0], "remedy": found[1]})
        return cls(name)


class JudgeName(_Name):
    """The name of another judge of the configuration, as a value or as the key of a mapping in the model of a judge.
    The name is checked, and the named judge becomes a part of the judge that names it.
    """


class SourceName(_Name):
    """The name of a source of the configuration, or a glob over names (`local-*`) or, after `model:`, over models
    (`model:Qwen/*`).
    """


def judges_named(value: Any) -> Iterator[str]:
    """Yield the names of judges in a model, in the order of its keys."""
    if isinstance(value, BaseModel):
        value = {name: getattr(value, name) for name in type(value).model_fields}
    if isinstance(value, Mapping):
        for key, item in value.items():
            yield from judges_named(key)
            yield from judges_named(item)
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from judges_named(item)
    elif type(value) is JudgeName:
        yield value
