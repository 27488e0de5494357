"""A table of cases as one test: hundreds of tests of microseconds cost seconds to collect and to set up."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterable
from typing import Any


def each_of(names: str | tuple[str, ...], cases: Iterable[Any]) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Run a test for each case, in one test; the signature is that of `pytest.mark.parametrize`.

    For pure functions only: all cases share the fixtures of the test. The error of a case carries the case as a note.
    """
    keys = (names,) if isinstance(names, str) else tuple(names)
    table = [(case,) if len(keys) == 1 else tuple(case) for case in cases]

    def decorate(test: Callable[..., None]) -> Callable[..., None]:
        @functools.wraps(test)
        def run(*args: Any, **fixtures: Any) -> None:
            assert table, "a table without a case proves nothing"
            for case in table:
                named = dict(zip(keys, case, strict=True))
                try:
                    test(*args, **fixtures, **named)
                except BaseException as error:
                    if hasattr(error, "add_note"):
                        error.add_note(f"case: {named!r}"[:2000])
                    raise

        signature = inspect.signature(test)
        left = [parameter for name, parameter in signature.parameters.items() if name not in keys]
        run.__signature__ = signature.replace(parameters=left)  # type: ignore[attr-defined]
        return run

    return decorate
