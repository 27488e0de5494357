"""Converts rows to samples. Columns are checked strictly, because a wrong guess would score the wrong text."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..errors import InputError
from ..samples import Message, Sample
from ..samples.check import blamed, plain_messages
from ..samples.images import Image, attach, is_empty_part, is_image_part
from ..samples.messages import dialogue
from ..secrets import Redactor
from .tables import RESULT, as_json, check_output, read_rows, type_of

_RESPONSE_COLUMNS = ("response", "solution_str", "completion")
_PROMPT_COLUMNS = ("messages", "prompt")
_IMAGE_COLUMNS = ("images", "response_images")
_MOST_SHOWN = 5
"""Most wrong rows that one error names."""


@dataclass(frozen=True, slots=True)
class Rollout:
    """One row of a file: its columns unchanged, and the sample that they describe."""

    row: dict[str, Any]
    sample: Sample


def read_rollouts(path: Path) -> Iterator[Rollout]:
    """Yield the rows of a `.jsonl`, `.json` or `.parquet` file. Raises `InputError` with the file and the line or row.

    Columns:
    - response: `response`, `solution_str` or `completion`; or its `turns`, a list of messages. Beside a response, each
      turn has an `end`: where it ends in the response, in characters
    - prompt: `messages` or `prompt`, a text or a list of messages
    - images: in the prompt's messages, in `images` (for the places `<image>` of the prompt) and in `response_images`;
      each is a data URL, or a path below the folder of the file
    - reference: `ground_truth` or `reward_model.ground_truth`
    - route to the judge: `data_source`
    - name of the sample: `id`; default: its line or row
    - training step: `step`, if it is a whole number; group: `group_id`, if it is a text or a number. Both stay in the
      extras, too

    All other columns become extras. A key of `extra_info` takes precedence over a column of the same name, because
    judges see that key in training.
    """
    for name, where, row in _rows(path):
        yield Rollout(row, sample_of(row, name=name, where=where, folder=path.parent))


def check_rollouts(path: Path, *, out: Path, overwrite: bool = False) -> int:
    """Check all rows of a file and return their number, at least one.

    Raises `InputError` with the first rows that cannot be scored or written to `out`, and if there are no rows. Without
    `overwrite`, also raises it if `out` exists or a row has a column `RESULT`, because their contents would be lost.
    """
    check_output(out, source=path, overwrite=overwrite)
    total, wrong = 0, list[str]()
    try:
        for name, where, row in _rows(path):
            total += 1
            try:
                sample_of(row, name=name, where=where, folder=path.parent)
                if RESULT in row and not overwrite:
                    remedy = "rename it, or replace it with --overwrite"
                    raise InputError(f"{where}: has a column {RESULT!r}, which the outcome would replace; {remedy}")
                as_json(row)
            except RecursionError:
                wrong.append(f"{where}: nested too deeply")
            except InputError as error:
                wrong.append(str(error))
    except InputError as error:  # rows after this one cannot be read
        wrong.append(str(error))
    if len(wrong) > _MOST_SHOWN:
        more = len(wrong) - _MOST_SHOWN
        wrong[_MOST_SHOWN:] = [f"... and {more:,} more row{'s' if more > 1 else ''}"]
    if wrong or not total:
        raise InputError("\n".join(wrong) or f"{path}: has no rows")
    return total


def _rows(path: Path) -> Iterator[tuple[str, str, dict[str, Any]]]:
    if os.path.exists(path) and not os.path.isfile(path) and not os.path.isdir(path):
        raise InputError(f"{path}: is no file (a pipe, for example), and rows are read twice; write them to a file")
    yield from read_rows(path)


def sample_of(row: Mapping[str, Any], *, name: str, where: str, folder: Path | None = None) -> Sample:
    """Return the sample that a row describes; see `read_rollouts` for the columns. Raises `InputError`.

    `name` is its id if the row has none. `where` begins the message of an error. Paths of images are read below
    `folder`; None: no path is read.
    """
    # A file with other rows has nulls here.
    has_response = any(row.get(column) is not None for column in _RESPONSE_COLUMNS)
    turns: Any = row.get("turns")
    if not has_response and turns is not None:
        response_column = "turns"
        messages = _turns(turns, f"{where}: turns")
        try:
            response, turns = dialogue(messages)
        except InputError as error:
            raise InputError(f"{where}: turns: {error}") from None
    else:
        turns = turns if _are_turns(turns) else ()
        response_column = _one_of(row, _RESPONSE_COLUMNS, where)
        response = row[response_column]
    if not isinstance(response, str):
        raise InputError(f"{where}: {response_column} must be a text, not {type_of(response)}")
    prompt_column = _one_of(row, _PROMPT_COLUMNS, where)
    data_source = row.get("data_source")
    if data_source is not None and not isinstance(data_source, str):
        raise InputError(f"{where}: data_source must be a text, not {type_of(data_source)}")
    reward_model, ground_truth = row.get("reward_model"), row.get("ground_truth")
    if ground_truth is None and isinstance(reward_model, Mapping):
        ground_truth = reward_model.get("ground_truth")
    messages = message_list(row[prompt_column], f"{where}: {prompt_column}")
    beside = {column: _listed_images(row.get(column), f"{where}: {column}", folder) for column in _IMAGE_COLUMNS}
    messages, rest = attach(_with_images(messages, folder), beside["images"])
    used = {response_column, prompt_column, "ground_truth", "data_source", "id", RESULT, *_IMAGE_COLUMNS}
    used |= {"turns"} if turns else set()
    extras = {key: value for key, value in row.items() if key not in used}
    if isinstance(extras.get("extra_info"), Mapping):
        extras.update(extras.pop("extra_info"))
    # pandas writes whole numbers as floats if some are missing.
    step, group = (int(v) if type(v) is float and v.is_integer() else v for v in map(row.get, ("step", "group_id")))
    return Sample(
        messages=messages,
        response=response,
        ground_truth=ground_truth,
        data_source=data_source or "",
        extras=extras,
        id=str(row["id"]) if row.get("id") is not None else name,
        step=step if type(step) is int and 0 <= step < 2**63 else None,
        group_id=str(group) if isinstance(group, (str, int)) and not isinstance(group, bool) else None,
        response_images=(*rest, *beside["response_images"]),
        turns=turns,
    )


def _turns(value: Any, where: str) -> list[Message]:
    """Read the turns of a response. Raises `InputError`."""
    if not isinstance(value, list):
        raise InputError(f"{where} must be a list of messages, not {type_of(value)}")
    messages = message_list(value, where)
    if all(message["role"] != "assistant" for message in messages):
        raise InputError(f"{where} has no message of the role assistant, which is the policy")
    return messages


def _are_turns(value: Any) -> bool:
    """Whether a column beside the response holds its turns. Data sets have other things by this name."""
    keys = {"role", "content", "end"}
    return isinstance(value, list) and all(isinstance(turn, Mapping) and keys <= turn.keys() for turn in value)


def _listed_images(value: Any, where: str, folder: Path | None) -> list[Any]:
    if value is None:
        return []
    if not isinstance(value, list):
        raise InputError(f"{where} must be a list of images, not {type_of(value)}")
    return [_image(image, folder) for image in value]


def _with_images(messages: list[Message], folder: Path | None) -> list[Any]:
    """Read the images in messages."""
    turns: list[Any] = []
    for message in messages:
        content: Any = message.get("content")
        if isinstance(content, list) and any(map(is_image_part, content)):
            parts = [
                {"type": "image", "image": _image(part, folder)} if _holds_image(part) else part for part in content
            ]
            message = {**message, "content": parts}  # type: ignore[typeddict-item]
        turns.append(message)
    return turns


def _holds_image(part: Any) -> bool:
    return is_image_part(part) and not is_empty_part(part)


def _image(value: Any, folder: Path | None) -> Any:
    """Return an image. What is none (a URL, a path out of the folder) stays as it is, and a judge that sends images
    refuses it.
    """
    try:
        return Image.of(value, folder=folder)
    except InputError:
        return value


def _one_of(row: Mapping[str, Any], columns: tuple[str, ...], where: str) -> str:
    for column in columns:
        if row.get(column) is not None:
            return column
    for column in columns:
        if column in row:
            raise InputError(f"{where}: {column} is null")
    has = Redactor().of(", ".join(map(str, row))) or "no columns"
    raise InputError(f"{where}: needs a column {' or '.join(columns)}; it has {has}")


def message_list(prompt: Any, where: str) -> list[Message]:
    """Return a prompt, which is a text or a list of messages, as messages. Raises `InputError`."""
    if isinstance(prompt, str):
        return [{"role": "user", "content": prompt}]
    if not isinstance(prompt, list) or not prompt:
        what = "an empty list" if prompt == [] else type_of(prompt)
        raise InputError(f"{where} must be a text or a list of messages, not {what}")
    # Parquet adds the keys of other messages with the value null.
    given = [
        {key: value for key, value in message.items() if value is not None} if isinstance(message, Mapping) else message
        for message in prompt
    ]
    try:
        return list(plain_messages(given))  # type: ignore[arg-type]
    except InputError as error:
        raise InputError(blamed(where, str(error))) from None
