"""The forms in which callers ask for rewards: bodies of requests to samples, and outcomes to bodies of replies.

`/score` is our own form and says everything. The others are those of programs that exist already, so that their users
change a URL and nothing else. None of them can express a missing reward. A reply in such a form therefore holds all
rewards that were asked for, or it is an HTTP error that names the cause: their clients treat a number as a reward.

Sources: slime v0.3.1 `slime/rollout/rm_hub/__init__.py` (remote_rm); OpenRLHF 3c3be62 `openrlhf/utils/agent.py`
(`_fetch_rewards_via_http`) and `openrlhf/cli/serve_rm.py`; MolGenDocking `mol_gen_docking/server_utils/utils.py`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import orjson

from ..client.rows import FRAMEWORK_PROMPT
from ..errors import InputError
from ..files import message_list, sample_of, to_result
from ..samples import Failed, Outcome, Sample, Scored
from .model_calls.terms import read_priority
from .replies import Refused

MISSING_STATUS = {"verdict": 502, "policy": 422}
"""HTTP status of a missing reward by the cause of the failure. Infra: 503, and 504 if time was up."""
_TIME_UP = ("deadline", "cutoff")
_BODY = "the body"


@dataclass(frozen=True, slots=True)
class ScoreRequest:
    """What a request asks for. `single`: one sample that is not in a list, so that the reply is none, either."""

    samples: Sequence[Sample]
    single: bool
    deadline_s: float | None = None
    priority: int | None = None


class Form(ABC):
    """One form of request and reply. `read` raises `InputError` for a body that is not in this form."""

    path: ClassVar[str]
    summary: ClassVar[str]
    """One line for the API description."""
    request: ClassVar[Mapping[str, Any]]
    reply: ClassVar[Mapping[str, Any]]
    """JSON schemas, for the API description."""

    @abstractmethod
    def read(self, body: Mapping[str, Any]) -> ScoreRequest:
        """Return the samples of a body."""

    @abstractmethod
    def answer(self, score_request: ScoreRequest, outcomes: Sequence[Outcome]) -> tuple[Any, int]:
        """Return the reply and its status. Raises `Refused` if the form cannot express the outcomes."""


class RewardsForm(Form):
    """A form that cannot express a missing reward. Its reply is then an error about the first missing one."""

    def answer(self, score_request: ScoreRequest, outcomes: Sequence[Outcome]) -> tuple[Any, int]:
        scored = [outcome for outcome in outcomes if isinstance(outcome, Scored)]
        if len(scored) == len(outcomes):
            return self.write(scored, single=score_request.single), 200
        missing = [outcome for outcome in outcomes if isinstance(outcome, Failed)]
        failed = missing[0]
        several = f" ({len(missing)} of {len(outcomes)} samples have no reward)" if len(outcomes) > 1 else ""
        detail = f"{failed.describe()}{several}"
        raise Refused(status_of(failed), failed.reason, detail, cause=failed.cause.value)

    @abstractmethod
    def write(self, outcomes: Sequence[Scored], *, single: bool) -> Any:
        """Return the reply, when every sample has a reward."""


def status_of(outcome: Outcome) -> int:
    """Return the HTTP status of an outcome: 200 if it has a reward."""
    if isinstance(outcome, Scored):
        return 200
    if outcome.reason == "input":
        return 422
    if outcome.reason in _TIME_UP:
        return 504
    return MISSING_STATUS.get(outcome.cause.value, 503)


def result_of(sample: Sample, outcome: Outcome) -> dict[str, Any]:
    """Return an outcome as a row of `/score`: the columns of `qreward score`, with the HTTP status and the id."""
    row = {"id": sample.id, "status": status_of(outcome), **to_result(outcome)}
    returned = outcome.verdict.returned if isinstance(outcome, Scored) else None
    if returned is not None:
        row["returned"] = _plain(returned)
    return row


def _plain(returned: Mapping[str, Any]) -> dict[str, Any]:
    """Return what a reward function returned, with texts for values that JSON cannot express."""
    return {_text(str(name)): _plain_value(value) for name, value in returned.items()}


def _plain_value(value: Any) -> Any:
    try:
        return orjson.loads(orjson.dumps(value, default=repr, option=_ANY))
    except (TypeError, ValueError, RecursionError):
        return _text(repr(value))


def _text(text: str) -> str:
    # UTF-8 cannot hold lone surrogates, which a reward function may copy from a response.
    return text.encode("utf-8", "replace").decode()


_ANY = orjson.OPT_SERIALIZE_NUMPY | orjson.OPT_NON_STR_KEYS


class ScoreForm(Form):
    """Our own form: one row, or `{"samples": [rows]}`. Rows have the columns that `qreward score` reads, and may have
    `group_id`, `step` and `split`.
    """

    path = "/score"
    summary = "Score one sample, or many."
    request: ClassVar[Mapping[str, Any]] = {
        "type": "object",
        "properties": {
            "samples": {"type": "array", "items": {"type": "object"}},
            "deadline_s": {"type": "number", "exclusiveMinimum": 0},
            "priority": {"type": ["integer", "string"]},
            "messages": {},
            "response": {"type": "string"},
            "ground_truth": {},
            "data_source": {"type": "string"},
        },
    }
    reply: ClassVar[Mapping[str, Any]] = {
        "type": "object",
        "properties": {
            "reward": {"type": ["number", "null"]},
            "status": {"type": "integer"},
            "results": {"type": "array", "items": {"type": "object"}},
            "missing": {"type": "integer"},
        },
    }
    _NAMING: ClassVar[Mapping[str, str]] = {
        "group_id": "group_id",
        "step": "step",
        "split": "split",
        FRAMEWORK_PROMPT: "prompt",
    }
    """Columns of a row that set fields of the sample as they are."""

    def read(self, body: Mapping[str, Any]) -> ScoreRequest:
        rest = dict(body)
        deadline_s, priority = rest.pop("deadline_s", None), rest.pop("priority", None)
        if deadline_s is not None and not (_is_number(deadline_s) and deadline_s > 0):
            raise InputError("deadline_s must be a number of seconds above 0")
        if priority is not None:
            priority = read_priority(priority, "priority")
        if "samples" not in rest:
            return ScoreRequest([self.sample(rest, _BODY, "0")], True, deadline_s, priority)
        rows = rest.pop("samples")
        if rest:
            raise InputError(f"{_BODY} has samples and also {', '.join(sorted(rest))}; write these into each sample")
        if not isinstance(rows, list):
            raise InputError(f"samples must be a list of objects, not {_kind(rows)}")
        return ScoreRequest(
            [self.sample(row, f"samples[{number}]", str(number)) for number, row in enumerate(rows)],
            False,
            deadline_s,
            priority,
        )

    def answer(self, score_request: ScoreRequest, outcomes: Sequence[Outcome]) -> tuple[Any, int]:
        rows = [result_of(sample, outcome) for sample, outcome in zip(score_request.samples, outcomes, strict=True)]
        if score_request.single:
            return rows[0], rows[0]["status"]
        missing = sum(row["reward"] is None for row in rows)
        # Some samples may have rewards, so the reply is no error, but says that it is not whole.
        return {"results": rows, "missing": missing}, 207 if missing else 200

    def sample(self, row: Any, where: str, name: str) -> Sample:
        """Return the sample of a row. `where` begins a message; `name` is the id of a row without one.

        Raises `InputError`.
        """
        if not isinstance(row, Mapping):
            raise InputError(f"{where} must be an object, not {_kind(row)}")
        naming: dict[str, Any] = {
            field: row[column] for column, field in self._NAMING.items() if row.get(column) is not None
        }
        # The engine checks the values, so that a wrong one fails its own sample.
        rest = {key: value for key, value in row.items() if key not in self._NAMING}
        if "prompt" in naming and rest.get("messages") == []:
            # The prompt of the framework may be all there is.
            rest["messages"], naming["messages"] = "-", ()
        sample = sample_of(rest, name=name, where=where)
        return replace(sample, **naming) if naming else sample


class SlimeForm(RewardsForm):
    """slime's `--rm-type remote_rm --rm-url`: prompt, response, label; the reply is the reward alone."""

    path = "/slime"
    summary = "slime: --rm-type remote_rm --rm-url URL/slime"
    request: ClassVar[Mapping[str, Any]] = {
        "type": "object",
        "required": ["prompt", "response"],
        "properties": {"prompt": {}, "response": {"type": "string"}, "label": {}},
    }
    reply: ClassVar[Mapping[str, Any]] = {"type": "number"}

    def read(self, body: Mapping[str, Any]) -> ScoreRequest:
        row = {"prompt": body.get("prompt"), "response": body.get("response"), "ground_truth": body.get("label")}
        return ScoreRequest([sample_of(row, name="0", where=_BODY)], True)

    def write(self, outcomes: Sequence[Scored], *, single: bool) -> Any:
        return outcomes[0].reward


class OpenRLHFForm(RewardsForm):
    """OpenRLHF's `--reward.remote_url`: lists of query (prompt and response), prompts and labels.

    Its trainer sends empty lists to all servers but the first, and expects empty lists back.
    """

    path = "/openrlhf"
    summary = "OpenRLHF: --reward.remote_url URL/openrlhf"
    request: ClassVar[Mapping[str, Any]] = {
        "type": "object",
        "required": ["query", "prompts"],
        "properties": {
            "query": {"type": "array", "items": {"type": "string"}},
            "prompts": {"type": "array", "items": {"type": "string"}},
            "labels": {"type": "array"},
        },
    }
    reply: ClassVar[Mapping[str, Any]] = {
        "type": "object",
        "properties": {
            "rewards": {"type": "array", "items": {"type": "number"}},
            "scores": {"type": "array", "items": {"type": "number"}},
            "extra_logs": {"type": "object"},
        },
    }

    def read(self, body: Mapping[str, Any]) -> ScoreRequest:
        queries, prompts = _texts(body, "query"), _texts(body, "prompts")
        labels = body.get("labels")
        if labels is None:
            labels = [None] * len(queries)
        if not isinstance(labels, list):
            raise InputError(f"labels must be a list, not {_kind(labels)}")
        if not len(queries) == len(prompts) == len(labels):
            raise InputError(
                f"query, prompts and labels must have one length; they have {len(queries)}, {len(prompts)} and "
                f"{len(labels)}"
            )
        return ScoreRequest(
            [
                Sample(
                    messages=message_list(prompt, f"prompts[{number}]"),
                    response=_after(prompt, query, number),
                    ground_truth=label,
                    id=str(number),
                )
                for number, (query, prompt, label) in enumerate(zip(queries, prompts, labels, strict=True))
            ],
            False,
        )

    def write(self, outcomes: Sequence[Scored], *, single: bool) -> Any:
        rewards = [outcome.reward for outcome in outcomes]
        names = sorted({name for outcome in outcomes for name in outcome.verdict.components})
        # The trainer makes a tensor of each list, so only numbers that all samples have can be logged.
        logs = {
            name: [outcome.verdict.components[name] for outcome in outcomes]
            for name in names
            if all(name in outcome.verdict.components for outcome in outcomes)
        }
        return {"rewards": rewards, "scores": rewards, "extra_logs": logs}


class GetRewardForm(RewardsForm):
    """The molecular verifier's `/get_reward`: metadata, query (the response) and prompts, each a value or a list.

    Metadata are the extras of a sample; `ground_truth` and `data_source` in it have their usual meaning.
    """

    path = "/get_reward"
    summary = "Molecular verifier: query, prompts and metadata, single or in lists."
    request: ClassVar[Mapping[str, Any]] = {
        "type": "object",
        "required": ["metadata", "query"],
        "properties": {"metadata": {}, "query": {}, "prompts": {}},
    }
    reply: ClassVar[Mapping[str, Any]] = {
        "type": "object",
        "properties": {
            "reward": {"type": "number"},
            "rewards": {"type": "array", "items": {"type": "number"}},
            "meta": {"type": "object"},
            "metas": {"type": "array", "items": {"type": "object"}},
            "error": {"type": ["string", "null"]},
            "next_turn_feedback": {"type": ["string", "null"]},
        },
    }

    def read(self, body: Mapping[str, Any]) -> ScoreRequest:
        for key in ("metadata", "query"):
            if body.get(key) is None:
                raise InputError(f"{key} is missing")
        given = body.get("prompts", body.get("prompt"))
        single = not isinstance(body["query"], list)
        metadata, queries = _listed(body["metadata"]), _listed(body["query"])
        prompts = [""] * len(queries) if given is None else _listed(given)
        if not len(metadata) == len(queries) == len(prompts):
            raise InputError(
                f"metadata, query and prompts must have one length; they have {len(metadata)}, {len(queries)} and "
                f"{len(prompts)}"
            )
        return ScoreRequest(
            [self._sample(*row, number) for number, row in enumerate(zip(metadata, queries, prompts, strict=True))],
            single,
        )

    def write(self, outcomes: Sequence[Scored], *, single: bool) -> Any:
        metas = [to_result(outcome) for outcome in outcomes]
        rewards = [outcome.reward for outcome in outcomes]
        shared = {"error": None, "next_turn_feedback": None}
        if single:
            return {"reward": rewards[0], "meta": metas[0], **shared}
        return {"rewards": rewards, "metas": metas, **shared}

    def _sample(self, metadata: Any, query: Any, prompt: Any, number: int) -> Sample:
        where = f"item {number}"
        if not isinstance(metadata, Mapping):
            raise InputError(f"{where}: metadata must be an object, not {_kind(metadata)}")
        # A row's own columns would be read from the metadata otherwise.
        known = {key: metadata[key] for key in ("ground_truth", "data_source") if key in metadata}
        extras = {key: value for key, value in metadata.items() if key not in known}
        return replace(
            sample_of({**known, "prompt": prompt, "response": query}, name=str(number), where=where), extras=extras
        )


FORMS: tuple[Form, ...] = (ScoreForm(), SlimeForm(), OpenRLHFForm(), GetRewardForm())
"""Every form that a server takes, each at its own path."""


def _after(prompt: str, query: str, number: int) -> str:
    """Return what follows `prompt` in `query`; a tokenizer may have put a token for the start before it."""
    before, found, response = query.partition(prompt)
    if prompt and (not found or len(before) > _LONGEST_START):
        raise InputError(
            f"query[{number}] does not begin with prompts[{number}], so its response cannot be told from the prompt; "
            "send the prompt as the tokenizer decodes it, or use /score"
        )
    return response if prompt else query


_LONGEST_START = 64
"""Most characters before the prompt in a query: tokens such as `<|begin_of_text|>`."""


def _texts(body: Mapping[str, Any], key: str) -> list[str]:
    found = body.get(key)
    if not isinstance(found, list) or not all(isinstance(text, str) for text in found):
        raise InputError(f"{key} must be a list of texts")
    return found


def _listed(value: Any) -> list[Any]:
    return value if isinstance(value, list) else [value]


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def _kind(value: Any) -> str:
    names = {dict: "an object", list: "a list", str: "a text", bool: "true or false", type(None): "null"}
    return names.get(type(value), "a number")
