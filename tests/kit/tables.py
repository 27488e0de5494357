"""A table of cases as one test: hundreds of tests of microseconds cost seconds to collect and to set up."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any


def each_of(
    names: str | tuple[str, ...], cases: Iterable[Any] | Callable[[], Iterable[Any]]
) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Run a test for each case, in one test; the signature is that of `pytest.mark.parametrize`, but `cases` may be a
    function that returns them, which is called when the test runs.

    All cases share the fixtures of the test, so these must not remember what a case did. The error of a case carries
    the case as a note.
    """
    keys = (names,) if isinstance(names, str) else tuple(names)

    @functools.cache
    def table() -> list[dict[str, Any]]:
        rows = [(case,) if len(keys) == 1 else tuple(case) for case in (cases() if callable(cases) else cases)]
        return [dict(zip(keys, row, strict=True)) for row in rows]

    if not callable(cases):
        table()

    def decorate(test: Callable[..., Any]) -> Callable[..., Any]:
        def run(*args: Any, **fixtures: Any) -> None:
            assert table(), "a table without a case proves nothing"
            for case in table():
                with _noted(case):
                    test(*args, **fixtures, **case)

        async def run_async(*args: Any, **fixtures: Any) -> None:
            assert table(), "a table without a case proves nothing"
            for case in table():
                with _noted(case):
                    await test(*args, **fixtures, **case)

        runs = functools.wraps(test)(run_async if inspect.iscoroutinefunction(test) else run)
        signature = inspect.signature(test)
        left = [parameter for name, parameter in signature.parameters.items() if name not in keys]
        runs.__signature__ = signature.replace(parameters=left)  # type: ignore[attr-defined]
        return runs

    return decorate


@contextmanager
def _noted(case: dict[str, Any]) -> Iterator[None]:
    try:
        yield
    except BaseException as error:
        if hasattr(error, "add_note"):
            error.add_note(f"case: {case!r}"[:2000])
        raise
