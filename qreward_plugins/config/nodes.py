"""What every part of the configuration tree is made of: the node, and numbers that are no truth values."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, FiniteFloat

from ..samples import fits_float32


def no_bool(value: Any) -> Any:
    # `requests_per_minute: yes` is a mistake, not 1 request a minute.
    if isinstance(value, bool):
        raise ValueError("true and false are not numbers")
    return value


def _held_by_trainers(number: float) -> float:
    if not fits_float32(number):
        raise ValueError("it is infinite in float32, which trainers hold")
    return number


Number = Annotated[FiniteFloat, BeforeValidator(no_bool), AfterValidator(_held_by_trainers)]
PositiveFloat = Annotated[FiniteFloat, Field(gt=0), BeforeValidator(no_bool)]
NonNegativeFloat = Annotated[FiniteFloat, Field(ge=0), BeforeValidator(no_bool)]
Integer = Annotated[int, BeforeValidator(no_bool)]
PositiveInt = Annotated[int, Field(gt=0), BeforeValidator(no_bool)]


class Node(BaseModel):
    """A node of the configuration tree."""

    # A validation error of pydantic quotes its input, which may be a key.
    model_config = ConfigDict(
        extra="forbid", frozen=True, use_attribute_docstrings=True, strict=False, hide_input_in_errors=True
    )


def one_or_several(value: Any) -> Any:
    """A text alone stands for a list of one."""
    return (value,) if isinstance(value, str) else value


def takes(words: str) -> Any:
    """Says in words what a value is that has a pattern, for messages: "the name of an environment variable"."""
    return Field(json_schema_extra={"takes": words})
