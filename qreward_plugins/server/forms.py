"""The forms in which callers ask for rewards: bodies of requests to samples, and outcomes to bodies of replies.

`/score` is our own form and says everything. The others are those of programs that exist already, so that their users
change a URL and nothing else. None of them can express a missing reward. A reply in such a form therefore holds all
rewards that were asked for, or it is an HTTP error that names the cause: their clients treat a number as a reward.

Sources: slime v0.3.1 `slime/rollout/rm_hub/__init__.py` (remote_rm); OpenRLHF 3c3be62 `openrlhf/utils/agent.py`
(`_fetch_rewards_via_http`) and `openrlhf/cli/serve_rm.py`; MolGenDocking `mol_gen_docking/server_utils/utils.py`.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import anyio
import orjson
from aiohttp import web
from anyio import to_thread

from ..client.rows import FRAMEWORK_PROMPT
from ..config.nodes import MOST_PRIORITY, PRIORITIES
from ..errors import InputError
from ..files import message_list, sample_of, to_result
from ..files.tables import type_of, writable
from ..samples import Failed, Outcome, Sample, Scored
from ..samples.check import Rejected, named
from ..samples.json_values import without_lone_surrogates
from .proxy import PREFIXES, in_form

BODY_WITHIN_S = 60.0
"""Most seconds in which the body of a request arrives; later ones get 408."""
_LARGE_BODY_BYTES = 2**20
_LONG_NUMBER = re.compile(rb"\d{19}")
_MISSING_STATUS = {"verdict": 502, "policy": 422}
"""HTTP status of a missing reward by the cause of the failure. Infra: 503, and 504 if time was up."""
_TIME_UP = ("deadline", "cutoff")
_BODY = "the body"
_AS_THEY_ARE = {"group_id": "group_id", "step": "step", "split": "split", FRAMEWORK_PROMPT: "prompt"}
"""Columns of a row of `/score` that set fields of the sample as they are."""
_LONGEST_START = 64
"""Most characters before the prompt in a query of OpenRLHF: tokens such as `<|begin_of_text|>`."""


class Refused(Exception):
    """A request that is answered with an error.

    `cause` is that of a missing reward. `retry_after_s`: seconds after which the request may be sent again.
    """

    def __init__(
        self, status: int, reason: str, detail: str, *, cause: str | None = None, retry_after_s: float | None = None
    ) -> None:
        super().__init__(detail)
        self.status, self.reason, self.detail = status, reason, detail
        self.cause, self.retry_after_s = cause, retry_after_s

    def response(self, request: web.Request) -> web.Response:
        """Return the reply, in the form of the client that sent `request`."""
        headers = {} if self.retry_after_s is None else {"Retry-After": str(math.ceil(self.retry_after_s))}
        if request.path.startswith(PREFIXES):
            return in_form(request, self.status, self.reason, self.detail, headers)
        error = {"cause": self.cause, "reason": self.reason, "detail": self.detail}
        return json_reply({"error": error}, self.status, headers)


def json_reply(value: Any, status: int = 200, headers: Mapping[str, str] | None = None) -> web.Response:
    """Return a JSON value."""
    return web.Response(body=orjson.dumps(value), status=status, headers=headers, content_type="application/json")


@dataclass(frozen=True, slots=True)
class ScoreRequest:
    """What a request asks for. `single`: one sample that is not in a list, so that the reply is none, either.
    `together`: the samples are one batch; otherwise they came one by one.
    """

    samples: Sequence[Sample]
    single: bool
    deadline_s: float | None = None
    priority: int | None = None
    together: bool = True


async def arrived(request: web.Request) -> None:
    """Read the body, so that no caller keeps a handler by sending it slowly. Raises `Refused`."""
    if not request.can_read_body:
        return
    try:
        with anyio.fail_after(BODY_WITHIN_S):
            await request.read()
    except TimeoutError:
        raise Refused(408, "slow", f"the body did not arrive within {BODY_WITHIN_S:g} s") from None
    except web.RequestPayloadError:
        raise Refused(400, "http", "the body was cut off, or is not encoded as its Content-Encoding says") from None


async def read_body(request: web.Request, read: Callable[[Mapping[str, Any]], ScoreRequest]) -> ScoreRequest:
    """Return what a body asks for. A large one is read in a thread, so that other callers do not wait."""

    def parse() -> ScoreRequest:
        try:
            parsed = orjson.loads(body)
            if _LONG_NUMBER.search(body):
                parsed = json.loads(body)  # orjson makes a float of an integer beyond 64 bits
        except orjson.JSONDecodeError as error:
            raise Refused(400, "json", f"the body is not JSON: {error.msg} at byte {error.pos:,}") from None
        except RecursionError:
            raise Refused(400, "json", "the body is nested too deeply") from None
        if not isinstance(parsed, Mapping):
            raise InputError("the body must be a JSON object")
        return read(parsed)

    body = await request.read()
    return parse() if len(body) < _LARGE_BODY_BYTES else await to_thread.run_sync(parse)


@dataclass(frozen=True)
class Form:
    """A form of request and reply. `read` raises `InputError` for a body that is not in this form. `write` is called
    when every sample has a reward, and with whether the request was single.
    """

    read: Callable[[Mapping[str, Any]], ScoreRequest]
    write: Callable[[Sequence[Scored], bool], Any]

    def answer(self, asked: ScoreRequest, outcomes: Sequence[Outcome]) -> Any:
        """Return the reply. Raises `Refused` if a sample has no reward."""
        missing = [outcome for outcome in outcomes if isinstance(outcome, Failed)]
        if not missing:
            return self.write([outcome for outcome in outcomes if isinstance(outcome, Scored)], asked.single)
        several = f" ({len(missing)} of {len(outcomes)} samples have no reward)" if len(outcomes) > 1 else ""
        detail = f"{missing[0].describe()}{several}"
        raise Refused(status_of(missing[0]), missing[0].reason, detail, cause=missing[0].cause.value)


def status_of(outcome: Outcome) -> int:
    """Return the HTTP status of an outcome: 200 if it has a reward."""
    if isinstance(outcome, Scored):
        return 200
    if outcome.reason == "input":
        return 422
    return 504 if outcome.reason in _TIME_UP else _MISSING_STATUS.get(outcome.cause.value, 503)


# Our own form


def read_score(body: Mapping[str, Any]) -> ScoreRequest:
    """Return what a body of `/score` asks for: one row, or `{"samples": [rows]}`. Rows have the columns that `qreward
    score` reads, and may have `group_id`, `step` and `split`. A row of several that cannot be read fails alone.

    Raises `InputError`.
    """
    rest = dict(body)
    deadline_s, priority = rest.pop("deadline_s", None), rest.pop("priority", None)
    together = rest.pop("together", True) is not False
    if deadline_s is not None and not (
        isinstance(deadline_s, (int, float)) and not isinstance(deadline_s, bool) and deadline_s > 0
    ):
        raise InputError("deadline_s must be a number of seconds above 0")
    if priority is not None:
        priority = PRIORITIES.get(priority, priority) if isinstance(priority, str) else priority
        if isinstance(priority, bool) or not isinstance(priority, int) or abs(priority) > MOST_PRIORITY:
            raise InputError("priority must be a whole number, or high, normal or low")
    if "samples" not in rest:
        return ScoreRequest([_sample_of_row(rest, _BODY)], True, deadline_s, priority, together)
    rows = rest.pop("samples")
    if rest:
        strange = ", ".join(sorted(rest))
        raise InputError(f"{_BODY} has samples and also {strange}; only deadline_s and priority may stand beside them")
    if not isinstance(rows, list):
        raise InputError(f"samples must be a list of objects, not {type_of(rows)}")
    return ScoreRequest([_read_row(row) for row in rows], False, deadline_s, priority, together)


def result_of(sample: Sample, outcome: Outcome) -> dict[str, Any]:
    """Return an outcome as a row of `/score`: the columns of `qreward score`, with the HTTP status and the id.

    Raises `TypeError` if JSON cannot hold what a function returned.
    """
    name = named(sample).id
    row = {"id": writable(name) if isinstance(name, str) else None, "status": status_of(outcome), **to_result(outcome)}
    returned = outcome.verdict.returned if isinstance(outcome, Scored) else None
    if returned is not None:
        row["returned"] = orjson.Fragment(orjson.dumps(without_lone_surrogates(returned)))
    return row


def _read_row(row: Any) -> Sample:
    try:
        return _sample_of_row(row, "the row")
    except InputError as error:
        given = row.get("id") if isinstance(row, Mapping) else None
        unread = Sample(messages=(), response="", id=None if given is None else str(given))
        return Rejected(unread, str(error))  # type: ignore[return-value]  # the engine takes it as the sample's failure


def _sample_of_row(row: Any, where: str) -> Sample:
    if not isinstance(row, Mapping):
        raise InputError(f"{where} must be an object, not {type_of(row)}")
    # The engine checks the values, so that a wrong one fails its own sample.
    fields: dict[str, Any] = {name: row[key] for key, name in _AS_THEY_ARE.items() if row.get(key) is not None}
    rest = {key: value for key, value in row.items() if key not in _AS_THEY_ARE}
    if "prompt" in fields and rest.get("messages") == []:
        # The prompt of the framework may be all there is.
        rest["messages"], fields["messages"] = "-", ()
    if row.get("id") is None:
        # A service may be sent the id, so no other one may take the place of none.
        fields["id"] = None
    sample = sample_of(rest, name="", where=where)
    return replace(sample, **fields) if fields else sample


# slime's `--rm-type remote_rm --rm-url`: prompt, response, label; the reply is the reward alone


def _read_slime(body: Mapping[str, Any]) -> ScoreRequest:
    row = {"prompt": body.get("prompt"), "response": body.get("response"), "ground_truth": body.get("label")}
    return ScoreRequest([sample_of(row, name="0", where=_BODY)], True)


def _write_slime(outcomes: Sequence[Scored], single: bool) -> Any:
    return outcomes[0].reward


# OpenRLHF's `--reward.remote_url`: lists of query (prompt and response), prompts and labels. Its trainer sends empty
# lists to all servers but the first, and expects empty lists back


def _read_openrlhf(body: Mapping[str, Any]) -> ScoreRequest:
    queries, prompts = _texts(body, "query"), _texts(body, "prompts")
    labels = [None] * len(queries) if body.get("labels") is None else body["labels"]
    if not isinstance(labels, list):
        raise InputError(f"labels must be a list, not {type_of(labels)}")
    _check_lengths(query=queries, prompts=prompts, labels=labels)
    samples = [
        Sample(message_list(prompt, f"prompts[{n}]"), _after(prompt, query, n), ground_truth=label, id=str(n))
        for n, (query, prompt, label) in enumerate(zip(queries, prompts, labels, strict=True))
    ]
    return ScoreRequest(samples, False)


def _write_openrlhf(outcomes: Sequence[Scored], single: bool) -> Any:
    rewards, components = [each.reward for each in outcomes], [each.verdict.components for each in outcomes]
    # The trainer makes a tensor of each list, so only numbers that all samples have can be logged.
    names = sorted(set.intersection(*map(set, components))) if components else []
    return {
        "rewards": rewards,
        "scores": rewards,
        "extra_logs": {name: [c[name] for c in components] for name in names},
    }


def _after(prompt: str, query: str, number: int) -> str:
    """Return what follows `prompt` in `query`; a tokenizer may have put a token for the start before it."""
    before, found, response = query.partition(prompt) if prompt else ("", "", query)
    if prompt and (not found or len(before) > _LONGEST_START):
        raise InputError(
            f"query[{number}] does not begin with prompts[{number}], so its response cannot be told from the prompt; "
            "send the prompt as the tokenizer decodes it, or use /score"
        )
    return response


# The molecular verifier's `/get_reward`: metadata, query (the response) and prompts, each a value or a list. Metadata
# are the extras of a sample; `ground_truth` and `data_source` in it have their usual meaning


def _read_get_reward(body: Mapping[str, Any]) -> ScoreRequest:
    for key in ("metadata", "query"):
        if body.get(key) is None:
            raise InputError(f"{key} is missing")
    metadata, queries = _listed(body["metadata"]), _listed(body["query"])
    given = body.get("prompts", body.get("prompt"))
    prompts = [""] * len(queries) if given is None else _listed(given)
    _check_lengths(metadata=metadata, query=queries, prompts=prompts)
    rows = zip(metadata, queries, prompts, strict=True)
    return ScoreRequest([_molecule(*row, n) for n, row in enumerate(rows)], not isinstance(body["query"], list))


def _write_get_reward(outcomes: Sequence[Scored], single: bool) -> Any:
    metas, rewards = [to_result(outcome) for outcome in outcomes], [outcome.reward for outcome in outcomes]
    found = {"reward": rewards[0], "meta": metas[0]} if single else {"rewards": rewards, "metas": metas}
    # It is one text, so a batch has none.
    feedback = outcomes[0].verdict.rationale or None if single else None
    return {**found, "error": None, "next_turn_feedback": feedback}


def _molecule(metadata: Any, query: Any, prompt: Any, number: int) -> Sample:
    where = f"item {number}"
    if not isinstance(metadata, Mapping):
        raise InputError(f"{where}: metadata must be an object, not {type_of(metadata)}")
    # A row's own columns would be read from the metadata otherwise.
    known = {key: metadata[key] for key in ("ground_truth", "data_source") if key in metadata}
    sample = sample_of({**known, "prompt": prompt, "response": query}, name=str(number), where=where)
    return replace(sample, extras={key: value for key, value in metadata.items() if key not in known})


FORMS = {
    "/slime": Form(_read_slime, _write_slime),
    "/openrlhf": Form(_read_openrlhf, _write_openrlhf),
    "/get_reward": Form(_read_get_reward, _write_get_reward),
}
"""The forms of other programs, each at its own path."""


def _texts(body: Mapping[str, Any], key: str) -> list[str]:
    found = body.get(key)
    if not isinstance(found, list) or not all(isinstance(text, str) for text in found):
        raise InputError(f"{key} must be a list of texts")
    return found


def _listed(value: Any) -> list[Any]:
    return value if isinstance(value, list) else [value]


def _check_lengths(**lists: list[Any]) -> None:
    if len(set(map(len, lists.values()))) > 1:
        found = ", ".join(f"{name} has {len(each)}" for name, each in lists.items())
        raise InputError(f"the lists must have one length; {found}")
