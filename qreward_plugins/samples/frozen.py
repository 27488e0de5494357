"""Makes frozen dataclasses quick to construct.

The constructor that `dataclasses` writes for a frozen class calls `object.__setattr__` once for each field, and every
sample makes about ten such values with eighty fields in all. A class that is not frozen sets its slots directly, in a
tenth of the time. Python can change the class of an object to another one with the same slots, so the constructor here
sets the fields while the object is of a class that is not frozen.
"""

from __future__ import annotations

import functools
import inspect
from dataclasses import MISSING, fields
from typing import Any, TypeVar

T = TypeVar("T")


def quick(cls: type[T]) -> type[T]:
    """Give a dataclass with `frozen=True, slots=True` the same constructor, but a quicker one.

    Put it above `@dataclass`. Objects of subclasses are made by the constructor of `dataclasses`. It is for classes
    whose parents have no fields, without an `InitVar` and without a slot for weak references.
    """
    slowly: Any = cls.__init__
    names: dict[str, Any] = {
        "_cls": cls,
        "_open": type(cls.__name__, cls.__bases__, {"__slots__": cls.__slots__}),  # type: ignore[attr-defined]
        "_set": object.__setattr__,
        "_slowly": slowly,
    }
    given, passed, lines = ["self"], ["self"], ["_set(self, '__class__', _open)"]
    for name, parameter in list(inspect.signature(slowly).parameters.items())[1:]:
        if parameter.kind is parameter.KEYWORD_ONLY and "*" not in given:
            given.append("*")
        passed.append(f"{name}={name}" if "*" in given else name)
        given.append(name)
        if parameter.default is not parameter.empty:
            names[f"_default_{name}"] = parameter.default
            given[-1] += f"=_default_{name}"
    for field in fields(cls):  # type: ignore[arg-type]
        value, makes = field.name, field.default_factory is not MISSING
        if makes:
            names[f"_make_{field.name}"] = field.default_factory
            value = f"_make_{field.name}()"
            if field.init:
                value += f" if {field.name} is _default_{field.name} else {field.name}"
        elif not field.init:
            if field.default is MISSING:
                continue  # `__post_init__` sets it
            names[f"_default_{field.name}"] = field.default
            value = f"_default_{field.name}"
        lines.append(f"self.{field.name} = {value}")
    lines.append("self.__class__ = _cls")
    if hasattr(cls, "__post_init__"):
        lines.append("self.__post_init__()")
    source = [
        f"def __init__({', '.join(given)}):",
        f"    if type(self) is not _cls: return _slowly({', '.join(passed)})",
        *(f"    {line}" for line in lines),
    ]
    exec("\n".join(source), names)
    cls.__init__ = functools.update_wrapper(names["__init__"], slowly)  # type: ignore[method-assign]
    return cls
