"""The rows that each framework reads, and the task that a row describes."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Task:
    """One row: the prompt's messages, the reference answer, where it comes from, and the worked solution if known."""

    messages: tuple[Mapping[str, str], ...]
    reference: str
    source: str
    solution: str = ""

    @property
    def key(self) -> str:
        """Equal prompts have equal keys."""
        return json.dumps([dict(message) for message in self.messages], sort_keys=True)


@dataclass(frozen=True)
class Format:
    """The data set of one framework.

    `suffix` is the ending of its files, and `columns` are those that the framework reads. `row` makes a row of a task,
    its index and its split. `task` reads a row, and raises ValueError, TypeError or AttributeError if the framework
    could not train on it.
    """

    suffix: str
    columns: tuple[str, ...]
    row: Callable[[Task, int, str], dict[str, Any]]
    task: Callable[[Mapping[str, Any]], Task]


def _verl_row(task: Task, index: int, split: str) -> dict[str, Any]:
    return {
        "data_source": task.source,
        "prompt": [dict(message) for message in task.messages],
        "ability": "math",
        "reward_model": {"style": "rule", "ground_truth": task.reference},
        "extra_info": {"index": index, "split": split, "solution": task.solution},
    }


def _slime_row(task: Task, index: int, split: str) -> dict[str, Any]:
    about = {"data_source": task.source, "index": index, "split": split, "solution": task.solution}
    return {"prompt": [dict(message) for message in task.messages], "label": task.reference, "metadata": about}


def _roll_row(task: Task, index: int, split: str) -> dict[str, Any]:
    # The columns and types of ROLL's own training files, with which it may be mixed. `tag` chooses the domain.
    return {
        "id": str(index),
        "source": task.source,
        "difficulty": "0",
        "prompt": task.messages[-1]["content"],
        "messages": json.dumps([dict(message) for message in task.messages], ensure_ascii=False),
        "ground_truth": task.reference,
        "case_type": "",
        "test_case_function": "",
        "test_cases": "",
        "tag": task.source,
    }


def _verl_task(row: Mapping[str, Any]) -> Task:
    graded = row["reward_model"]
    if not isinstance(graded, Mapping) or "ground_truth" not in graded:
        raise ValueError("reward_model has no ground_truth")
    about = row.get("extra_info") or {}
    solution = about.get("solution") or about.get("answer") or ""
    return Task(_messages(row["prompt"]), _text(graded["ground_truth"]), _text(row["data_source"]), str(solution))


def _slime_task(row: Mapping[str, Any]) -> Task:
    about = row.get("metadata") or {}
    if not isinstance(about, Mapping):
        raise ValueError("metadata is no object")
    prompt = row["prompt"]
    # With --apply-chat-template slime makes one message of a plain text.
    messages = ({"role": "user", "content": prompt},) if isinstance(prompt, str) else _messages(prompt)
    source = about.get("data_source") or about.get("source_name") or ""
    return Task(messages, _text(row["label"]), str(source), str(about.get("solution") or ""))


def _roll_task(row: Mapping[str, Any]) -> Task:
    messages = row["messages"]
    return Task(
        _messages(json.loads(messages) if isinstance(messages, str) else messages),
        _text(row["ground_truth"]),
        _text(row["tag"]),
    )


def _messages(messages: Any) -> tuple[Mapping[str, str], ...]:
    if not isinstance(messages, (list, tuple)) or not messages:
        raise ValueError("the prompt is no list of messages")
    for message in messages:
        if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
            raise ValueError("a message of the prompt has no role")
        if not isinstance(message.get("content"), str):
            raise ValueError("the content of a message is no text")
    return tuple({"role": message["role"], "content": message["content"]} for message in messages)


def _text(value: Any) -> str:
    if isinstance(value, bool) or not isinstance(value, (str, int, float)) or not str(value).strip():
        raise ValueError("the reference answer or the data source is no text, or empty")
    return str(value)


FORMATS: Mapping[str, Format] = {
    # RLHFDataset reads `prompt`; the reward loop reads `data_source` and `reward_model`.
    "verl": Format(".parquet", ("data_source", "prompt", "reward_model"), _verl_row, _verl_task),
    # slime.utils.data.Dataset with --input-key prompt --label-key label.
    "slime": Format(".jsonl", ("prompt", "label"), _slime_row, _slime_task),
    # get_encode_function reads `messages`, update_dataset_domain reads `tag`, reward workers `id` and `ground_truth`.
    "roll": Format(".jsonl", ("id", "messages", "ground_truth", "tag"), _roll_row, _roll_task),
}
