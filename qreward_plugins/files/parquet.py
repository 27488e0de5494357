"""Reads and writes rows in parquet. pyarrow is an optional dependency, so it is imported on first use.

Rows become Python values for the judges only. The output holds the input's columns unchanged, batch by batch, with the
outcomes added: a round trip through Python would change column types, and lose values that Python cannot hold.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, BinaryIO

from ..errors import InputError
from ..samples import Outcome
from .jsonl import as_json
from .results import RESULT, to_result

_READ_ROWS = 64
"""Number of rows that are held as Python values at a time; rows may be large."""

_ROW_GROUP_ROWS = 1024


def read_parquet(path: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield each row of a file with its name ("row 7"). Raises `InputError`."""
    number = 0
    with _parquet_file(path) as file, _explained(path):
        for batch in file.iter_batches(batch_size=_READ_ROWS):
            for row in batch.to_pylist():
                number += 1
                yield f"row {number}", row


class ParquetRows:
    """Writes the rows of the parquet file `source`, each with its outcome, to the open file `target`.

    Components become one JSON text, because their names differ between judges. A column `qreward` of the source is
    replaced. Call `finish` at the end: a parquet file is unreadable until then.
    """

    def __init__(self, target: BinaryIO, source: Path) -> None:
        self._arrow, parquet = _pyarrow()
        self._open = ExitStack()
        file = self._open.enter_context(_parquet_file(source))
        self._batches = (batch for batch in file.iter_batches(batch_size=_ROW_GROUP_ROWS) if batch.num_rows)
        self._batch: Any = next(self._batches, None)
        self._results: list[dict[str, Any]] = []
        self._column = self._arrow.field(RESULT, _result_type(self._arrow))
        self._kept = [number for number, name in enumerate(file.schema_arrow.names) if name != RESULT]
        schema = self._arrow.schema([file.schema_arrow.field(number) for number in self._kept])
        self._schema = schema.with_metadata(file.schema_arrow.metadata).append(self._column)
        self._writer = parquet.ParquetWriter(target, self._schema)

    def write(self, row: Mapping[str, Any], outcome: Outcome) -> None:
        """Write the next row of the source with its outcome. `row` is ignored."""
        result = to_result(outcome)
        for nested in ("components", "steps"):
            result[nested] = as_json(result[nested]).decode()
        self._results.append(result)
        if self._batch is not None and len(self._results) == self._batch.num_rows:
            self._write_group()

    def finish(self) -> None:
        """Write the remaining rows and the footer, and close the source. The target stays open."""
        with self._open:
            try:
                if self._results:
                    self._write_group()
            finally:
                self._writer.close()

    def _write_group(self) -> None:
        batch = self._batch.slice(0, len(self._results))
        columns = [batch.column(number) for number in self._kept]
        columns.append(self._arrow.array(self._results, type=self._column.type))
        self._writer.write_table(self._arrow.Table.from_arrays(columns, schema=self._schema))
        self._results = []
        self._batch = next(self._batches, None)


def _result_type(arrow: Any) -> Any:
    texts = (
        *("outcome", "cause", "reason", "detail", "components", "steps", "rationale", "judge", "source", "model"),
        "weight_version",
    )
    numbers = ("reward", "latency_s", "cost_usd")
    counts = ("attempts", "prompt_tokens", "completion_tokens")
    flags = ("correct", "cached", "cut")
    kinds = dict.fromkeys(texts, arrow.string()) | dict.fromkeys(numbers, arrow.float64())
    kinds |= dict.fromkeys(counts, arrow.int64()) | dict.fromkeys(flags, arrow.bool_())
    return arrow.struct(list(kinds.items()))


@contextmanager
def _parquet_file(path: Path) -> Iterator[Any]:
    _, parquet = _pyarrow()
    with _explained(path), path.open("rb") as file:
        yield parquet.ParquetFile(file)


@contextmanager
def _explained(path: Path) -> Iterator[None]:
    arrow, _ = _pyarrow()
    try:
        yield
    except arrow.ArrowException as error:
        raise InputError(f"{path}: not a readable parquet file ({_first_line(error)})") from None
    except OSError as error:
        raise InputError(f"{path}: cannot be read ({error.strerror or _first_line(error)})") from None
    except (ValueError, OverflowError) as error:
        # A timestamp may be too precise or too far away for Python.
        raise InputError(f"{path}: contains a value that Python cannot represent ({_first_line(error)})") from None


def _first_line(error: Exception) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0]


def _pyarrow() -> tuple[Any, Any]:
    try:
        import pyarrow
        import pyarrow.parquet
    except ModuleNotFoundError:
        raise InputError("parquet files need pyarrow: pip install 'qreward-plugins[parquet]'") from None
    return pyarrow, pyarrow.parquet
