"""Rows of rollouts in files: JSONL and parquet in, the same rows with their outcome out, in the same order.

A file is read twice: once to count and check every row, so that a mistake in row 90,000 is told before the first
request is paid for, and once to score. Output goes to `OUT.partial` and takes its place when it is complete, so that
OUT is never a torso.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, Protocol

import orjson

from .errors import InputError
from .samples import Failed, Message, Outcome, Sample, Scored

RESULT = "qreward"
"""The column that carries the outcome."""

_RESPONSE_COLUMNS = ("response", "solution_str", "completion")
_PROMPT_COLUMNS = ("messages", "prompt")
_BATCH_ROWS = 1024


def read_rows(path: Path) -> Iterator[dict[str, Any]]:
    """The rows of a `.jsonl` or `.parquet` file. Raises `InputError` naming the file and the row."""
    if path.suffix == ".parquet":
        yield from _read_parquet(path)
    elif path.suffix in (".jsonl", ".ndjson"):
        yield from _read_jsonl(path)
    else:
        raise InputError(f"{path}: the name must end in .jsonl or .parquet")


def to_sample(row: Mapping[str, Any], where: str) -> Sample:
    """One row as a sample; `where` names the row in errors.

    The response is the column `response` (or `solution_str`, `completion`), the prompt `messages` or `prompt` (a text
    or a list of messages), the reference `ground_truth` (or `reward_model.ground_truth`), the judge's route
    `data_source`; what else there is goes to the judge as extras.
    """
    response_column = _one_of(row, _RESPONSE_COLUMNS, where)
    response = row[response_column]
    if not isinstance(response, str):
        raise InputError(f"{where}: {response_column} must be a text, not {_type(response)}")
    prompt_column = _one_of(row, _PROMPT_COLUMNS, where)
    reward_model = row.get("reward_model")
    ground_truth = row.get("ground_truth")
    if ground_truth is None and isinstance(reward_model, Mapping):
        ground_truth = reward_model.get("ground_truth")
    used = {response_column, prompt_column, "ground_truth", "data_source", "id", "extra_info", RESULT}
    extras = {key: value for key, value in row.items() if key not in used}
    extra_info = row.get("extra_info")
    if isinstance(extra_info, Mapping):
        extras.update(extra_info)
    return Sample(
        messages=_messages(row[prompt_column], f"{where}: {prompt_column}"),
        response=response,
        ground_truth=ground_truth,
        data_source=str(row.get("data_source") or ""),
        extras=extras,
        id=str(row["id"]) if row.get("id") is not None else where,
    )


def to_result(outcome: Outcome) -> dict[str, Any]:
    """An outcome as the value of the column `qreward`, with the same keys for all; `reward` is None where there is
    none.
    """
    verdict = outcome.verdict if isinstance(outcome, Scored) else None
    failed = outcome if isinstance(outcome, Failed) else None
    told = outcome.verdict if isinstance(outcome, Scored) else outcome
    return {
        "reward": outcome.reward,
        "outcome": "scored" if verdict else "failed",
        "cause": failed.cause.value if failed else None,
        "reason": failed.reason if failed else None,
        "detail": failed.detail if failed else None,
        "components": dict(verdict.components) if verdict else {},
        "correct": verdict.correct if verdict else None,
        "rationale": verdict.rationale if verdict else None,
        "judge": told.judge,
        "source": told.source,
        "model": verdict.model if verdict else None,
        "attempts": told.attempts,
        "prompt_tokens": told.usage.prompt_tokens,
        "completion_tokens": told.usage.completion_tokens,
        "latency_s": told.latency_s,
        "cost_usd": told.cost_usd,
        "cached": verdict.cached if verdict else False,
    }


class RowWriter(Protocol):
    """Writes rows to `OUT.partial`, which becomes OUT when the context is left without an error."""

    def write(self, row: Mapping[str, Any], outcome: Outcome) -> None: ...

    def __enter__(self) -> RowWriter: ...

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None
    ) -> None: ...


def open_writer(path: Path, *, source: Path) -> RowWriter:
    """A writer of the rows of `source` with their outcomes.

    A parquet file can only be made from a parquet file, whose column types it keeps; a `.jsonl` file from either.
    Raises `InputError` for other names, a missing folder, or the input itself as output.
    """
    if not path.parent.is_dir():
        raise InputError(f"{path}: the folder {path.parent} does not exist")
    if path.resolve() == source.resolve():
        raise InputError(f"{path}: is the input itself; name another file")
    if path.suffix == ".parquet":
        if source.suffix != ".parquet":
            raise InputError(f"{path}: parquet needs a parquet input, whose column types it keeps; write to .jsonl")
        return _ParquetWriter(path, source)
    if path.suffix in (".jsonl", ".ndjson"):
        return _JsonlWriter(path)
    raise InputError(f"{path}: the name must end in .jsonl or .parquet")


def partial_path(path: Path) -> Path:
    """Where the rows of an unfinished run stand."""
    return path.with_name(path.name + ".partial")


class _JsonlWriter:
    def __init__(self, path: Path) -> None:
        self._path = path
        self._file = partial_path(path).open("wb")

    def write(self, row: Mapping[str, Any], outcome: Outcome) -> None:
        line = orjson.dumps({**row, RESULT: to_result(outcome)}, option=orjson.OPT_SERIALIZE_NUMPY, default=str)
        self._file.write(line + b"\n")
        self._file.flush()

    def __enter__(self) -> _JsonlWriter:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        self._file.close()
        if kind is None:
            os.replace(partial_path(self._path), self._path)


class _ParquetWriter:
    """Collects rows into row groups. Components become one JSON text, because their names differ between judges."""

    def __init__(self, path: Path, source: Path) -> None:
        self._path = path
        self._rows: list[dict[str, Any]] = []
        arrow, parquet = _pyarrow()
        self._table = arrow.Table
        schema = parquet.read_schema(source)
        if RESULT in schema.names:
            schema = schema.remove(schema.get_field_index(RESULT))
        self._schema = schema.append(arrow.field(RESULT, _result_type(arrow)))
        self._writer = parquet.ParquetWriter(partial_path(path), self._schema)

    def write(self, row: Mapping[str, Any], outcome: Outcome) -> None:
        result = to_result(outcome)
        result["components"] = orjson.dumps(result["components"]).decode()
        self._rows.append({**row, RESULT: result})
        if len(self._rows) >= _BATCH_ROWS:
            self._flush()

    def __enter__(self) -> _ParquetWriter:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        try:
            if kind is None:
                self._flush()
        finally:
            self._writer.close()
        if kind is None:
            os.replace(partial_path(self._path), self._path)

    def _flush(self) -> None:
        self._writer.write_table(self._table.from_pylist(self._rows, schema=self._schema))
        self._rows.clear()


def _result_type(arrow: Any) -> Any:
    texts = ("outcome", "cause", "reason", "detail", "components", "rationale", "judge", "source", "model")
    numbers = ("reward", "latency_s", "cost_usd")
    flags = ("correct", "cached")
    kinds = dict.fromkeys(texts, arrow.string()) | dict.fromkeys(numbers, arrow.float64())
    kinds |= dict.fromkeys(flags, arrow.bool_())
    counts = ("attempts", "prompt_tokens", "completion_tokens")
    kinds |= dict.fromkeys(counts, arrow.int64())
    return arrow.struct(list(kinds.items()))


def _read_jsonl(path: Path) -> Iterator[dict[str, Any]]:
    with _opened(path) as file:
        for number, line in enumerate(file, start=1):
            if not line.strip():
                continue
            try:
                row = orjson.loads(line)
            except orjson.JSONDecodeError as error:
                raise InputError(f"{path}, line {number}: not valid JSON ({error})") from None
            if not isinstance(row, dict):
                raise InputError(f"{path}, line {number}: must be an object, not {_type(row)}")
            yield row


def _read_parquet(path: Path) -> Iterator[dict[str, Any]]:
    arrow, parquet = _pyarrow()
    with _opened(path) as file:
        try:
            table = parquet.ParquetFile(file)
            for batch in table.iter_batches(batch_size=_BATCH_ROWS):
                yield from batch.to_pylist()
        except arrow.ArrowInvalid as error:
            raise InputError(f"{path}: not a readable parquet file ({error})") from None


def _opened(path: Path) -> Any:
    try:
        return path.open("rb")
    except OSError as error:
        raise InputError(f"{path}: cannot be read ({error.strerror})") from None


def _pyarrow() -> tuple[Any, Any]:
    try:
        import pyarrow
        import pyarrow.parquet
    except ModuleNotFoundError:
        raise InputError("parquet files need pyarrow: pip install 'qreward-plugins[parquet]'") from None
    return pyarrow, pyarrow.parquet


def _one_of(row: Mapping[str, Any], columns: tuple[str, ...], where: str) -> str:
    for column in columns:
        if row.get(column) is not None:
            return column
    raise InputError(f"{where}: needs a column {' or '.join(columns)}; it has {', '.join(map(str, row)) or 'none'}")


def _messages(prompt: Any, where: str) -> list[Message]:
    if isinstance(prompt, str):
        return [{"role": "user", "content": prompt}]
    if not isinstance(prompt, list) or not prompt:
        raise InputError(f"{where} must be a text or a list of messages, not {_type(prompt)}")
    for message in prompt:
        if not isinstance(message, Mapping) or "role" not in message or "content" not in message:
            raise InputError(f"{where}: every message needs role and content")
    return [{"role": str(message["role"]), "content": message["content"]} for message in prompt]


def _type(value: Any) -> str:
    return {dict: "an object", list: "a list", str: "a text", type(None): "null", bool: "true or false"}.get(
        type(value), "a number" if isinstance(value, (int, float)) else type(value).__name__
    )
