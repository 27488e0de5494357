"""Services that score without a chat, and a sandbox.

They are the reward models of vLLM, SGLang, TEI and OpenRLHF, whose requests hold one or several texts; slime's remote
reward model (`--rm-url`), whose requests hold one sample; and `POST /run_code` in the form of SandboxFusion.
Reward models differ in the path, the keys of the body and the shape of a result, so each is one value of `WIRES`. Two
servers may share a path: the keys of the body say which one is meant. A fault of the stage "list" or "verdict" changes
the results. The sandbox runs nothing: the scorer says what the program would print, or gives the whole reply.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from ..faults import FaultKind
from ..faulty_answers import PROSE, REFUSAL, SCORE_IS, faulty_score
from ..judge_calls import (
    Answer,
    JudgeCall,
    JudgeReply,
    Refused,
    ScoreCall,
    check_messages,
    dump_verdict,
    read_object,
    text_of,
)
from .base import known_model

SCORE_PATH = "/score"
"""Of slime's requests; vLLM's have the same."""

Logits = Mapping[str, Any]
"""Numbers by label. A fault may put anything in the place of a number."""


@dataclass(frozen=True)
class Wire:
    """One server's `POST path`. `key` is the key of the body that holds the items; no other server at this path has it.

    `texts` turns the body into pairs of a prompt and a response, and raises `Refused`. `result` turns the numbers of an
    item into its result. `fields` makes the reply from the results, the model and the tokens. `activated`: whether
    the server turns logits into probabilities. `numbered` says whether results state the index of their item.
    """

    path: str
    key: str
    texts: Callable[[dict[str, Any]], Pairs]
    result: Callable[[Logits], Any]
    fields: Callable[[list[Any], str, int], Any]
    activated: Callable[[Mapping[str, Any]], bool] = lambda fields: False
    numbered: bool = False
    names_model: bool = False
    """Whether the body must name a model of the server."""


@dataclass(frozen=True)
class RewardCall(JudgeCall):
    """A request for the scores of `items`. Each is scored as a `ScoreCall` of its own."""

    items: tuple[ScoreCall, ...] = ()
    wire: Wire | None = None

    @cached_property
    def prompt_tokens(self) -> int:
        return sum(item.prompt_tokens for item in self.items)


def read_scored(path: str, body: bytes, models: Sequence[str]) -> JudgeCall:
    """Read a request for scores: the keys of its body say which server at this path is meant. Raises `Refused`."""
    fields = read_object(body)
    for wire in WIRES[path]:
        if wire.key in fields:
            model = known_model(fields.get("model"), models) if wire.names_model else ""
            pairs = wire.texts(fields)
            if not pairs:
                raise Refused(400, "you must pass at least one text")
            if any(not response for _, response in pairs):
                raise Refused(400, "a text cannot be empty")
            items = tuple(ScoreCall(model, prompt, fields, response) for prompt, response in pairs)
            return RewardCall(model, [], fields, items, wire)
    if path != SCORE_PATH:
        raise Refused(400, f"{path} needs one of the keys {', '.join(sorted({wire.key for wire in WIRES[path]}))}")
    prompt, response, label = fields.pop("prompt", ""), fields.pop("response", None), fields.pop("label", None)
    if not isinstance(response, str):
        raise Refused(400, "'response' must be a string")
    if isinstance(prompt, str):
        prompt = [{"role": "user", "content": prompt}]
    if not isinstance(prompt, list):
        raise Refused(400, "'prompt' must be a string or a list of messages")
    check_messages(prompt)
    return ScoreCall(models[0] if models else "", prompt, fields, response, label)


def scored_reply(call: JudgeCall, answers: Sequence[Answer], fault: FaultKind | None, number: int) -> JudgeReply:
    """The reply for the scorer's answers. Raises `TypeError` for answers of another type.

    Of a sample: a number, a mapping, or a text that is sent unchanged; NaN and infinity pass, because some services
    send them. Of the texts of a reward model: a number is one logit, a mapping has a logit for each label.
    """
    if not isinstance(call, RewardCall):
        return _score(answers[0], fault)
    wire = call.wire
    assert wire is not None
    logits = [_logits(answer) for answer in answers]
    if wire.activated(call.parameters):
        logits = [_activated(each) for each in logits]
    if fault is not None and fault in _VALUES:
        logits = [dict.fromkeys(logits[0], _VALUES[fault]), *logits[1:]]
    results = [wire.result(each) for each in logits]
    if wire.numbered:
        results = [{"index": index, **result} for index, result in enumerate(results)]
    if fault in _LISTS:
        results = _LISTS[fault](results, wire.numbered)
    return JudgeReply(wire.fields(results, call.items[0].model, call.prompt_tokens))


def _score(answer: Answer, fault: FaultKind | None) -> JudgeReply:
    if fault is not None and fault.stage == "verdict":
        text = faulty_score(fault, answer)
    elif isinstance(answer, str):
        text = answer
    elif isinstance(answer, Mapping) or (isinstance(answer, (int, float)) and not isinstance(answer, bool)):
        text = dump_verdict(answer)
    else:
        raise TypeError(f"the scorer returned {type(answer).__name__}: return a float, a mapping or a str")
    # The first half of a number is a number, too. So what faults cut is a mapping.
    fields = (dict(answer) or {"score": 1.0}) if isinstance(answer, Mapping) else {"score": answer}
    return JudgeReply(fields, text=text)


def _logits(answer: Answer) -> dict[str, Any]:
    given: Mapping[str, object] = answer if isinstance(answer, Mapping) else {"LABEL_0": answer}
    if not given or not all(isinstance(one, (int, float)) and not isinstance(one, bool) for one in given.values()):
        raise TypeError("a reward model answers with a number, or with a mapping of labels to numbers")
    return dict(given)


def _activated(logits: Mapping[str, float]) -> dict[str, float]:
    """Apply what servers apply: a sigmoid to one logit, a softmax to several."""
    if len(logits) == 1:
        return {label: 0.5 * (1 + math.tanh(logit / 2)) for label, logit in logits.items()}
    most = max(logits.values())
    weights = {label: math.exp(logit - most) for label, logit in logits.items()}
    return {label: weight / sum(weights.values()) for label, weight in weights.items()}


def _strings(value: object, key: str) -> list[str]:
    items: list[Any] = value if isinstance(value, list) else [value]
    if not all(isinstance(item, str) for item in items):
        raise Refused(400, f"{key!r} must be a text or a list of texts")
    return items


Pairs = list[tuple[Sequence[Mapping[str, object]], str]]
"""A prompt and a response each."""


def _plain(key: str) -> Callable[[dict[str, Any]], Pairs]:
    return lambda fields: [((), text) for text in _strings(fields[key], key)]


def _conversation(fields: dict[str, Any]) -> Pairs:
    messages = fields["messages"]
    if not isinstance(messages, list) or not messages:
        raise Refused(400, "'messages' must be a list of at least one message")
    check_messages(messages)
    return [(messages[:-1], text_of(messages[-1].get("content")))]


def _tei_inputs(fields: dict[str, Any]) -> Pairs:
    inputs = fields["inputs"]
    if isinstance(inputs, str):
        return [((), inputs)]
    # A list of lists is a batch; each holds a text, or a pair of texts.
    if not isinstance(inputs, list) or not all(isinstance(item, list) and len(item) == 1 for item in inputs):
        raise Refused(422, "'inputs' must be a text, or a list of lists of one text")
    return [((), text) for item in inputs for text in _strings(item, "inputs")]


def _pairs(prompts: str, responses: str) -> Callable[[dict[str, Any]], Pairs]:
    def texts(fields: dict[str, Any]) -> Pairs:
        first, second = _strings(fields[prompts], prompts), _strings(fields.get(responses), responses)
        if len(first) == 1:
            first *= len(second)
        if len(first) != len(second):
            raise Refused(400, f"{prompts!r} and {responses!r} must have the same length")
        return [([{"role": "user", "content": prompt}], text) for prompt, text in zip(first, second, strict=True)]

    return texts


def _data(results: list[Any], model: str, tokens: int) -> Any:
    usage = {"prompt_tokens": tokens, "total_tokens": tokens}
    return {"object": "list", "model": model, "data": results, "usage": usage}


def _bare(results: list[Any], model: str, tokens: int) -> Any:
    return results


def _of_classify(logits: Logits) -> Any:
    numbers = {label: each for label, each in logits.items() if isinstance(each, (int, float))}
    label = max(numbers, key=lambda one: numbers[one], default=next(iter(logits)))
    return {"label": label, "probs": list(logits.values()), "num_classes": len(logits)}


def _of_pooling(logits: Logits) -> Any:
    return {"object": "pooling", "data": list(logits.values())}


def _of_embeddings(logits: Logits) -> Any:
    return {"embedding": list(logits.values())}


def _vllm(path: str, key: str, texts: Callable[[dict[str, Any]], Pairs], result: Callable[[Logits], Any]) -> Wire:
    # vLLM applies a sigmoid or a softmax unless the request says not to.
    raw = lambda fields: fields.get("use_activation") is not False  # noqa: E731
    return Wire(path, key, texts, result, _data, raw, numbered=True, names_model=True)


_ALL = (
    _vllm("/classify", "input", _plain("input"), _of_classify),
    _vllm("/classify", "messages", _conversation, _of_classify),
    _vllm("/pooling", "input", _plain("input"), _of_pooling),
    _vllm("/pooling", "messages", _conversation, _of_pooling),
    _vllm(
        SCORE_PATH,
        "queries",
        _pairs("queries", "documents"),
        lambda logits: {"object": "score", "score": next(iter(logits.values()))},
    ),
    Wire("/classify", "text", _plain("text"), _of_embeddings, _bare),
    Wire("/v1/embeddings", "input", _plain("input"), _of_embeddings, _data, numbered=True),
    Wire(
        "/predict",
        "inputs",
        _tei_inputs,
        lambda logits: [{"label": label, "score": each} for label, each in logits.items()],
        _bare,
        lambda fields: fields.get("raw_scores") is not True,
    ),
    Wire(
        "/get_reward",
        "query",
        _plain("query"),
        lambda logits: next(iter(logits.values())),
        lambda results, model, tokens: {"rewards": results},
    ),
)
WIRES: Mapping[str, Sequence[Wire]] = {wire.path: [other for other in _ALL if other.path == wire.path] for wire in _ALL}
"""The servers by path."""


def _renumbered(results: list[Any], numbered: bool) -> list[Any]:
    return [{**result, "index": 0} for result in results] if numbered and len(results) > 1 else results


def _unnumbered(results: list[Any], numbered: bool) -> list[Any]:
    return [{key: value for key, value in each.items() if key != "index"} for each in results] if numbered else results


_LISTS: Mapping[FaultKind | None, Callable[[list[Any], bool], list[Any]]] = {
    FaultKind.RESULTS_TOO_FEW: lambda results, numbered: results[:-1],
    FaultKind.RESULTS_TOO_MANY: lambda results, numbered: [*results, results[-1]],
    # Without an index the results cannot be matched: such a server is not played.
    FaultKind.RESULTS_SHUFFLED: lambda results, numbered: results[::-1] if numbered else results,
    FaultKind.RESULTS_UNNUMBERED: _unnumbered,
    FaultKind.RESULTS_MISNUMBERED: _renumbered,
}

_VALUES: Mapping[FaultKind, object] = {
    FaultKind.NULL_CONTENT: None,
    FaultKind.CONTENT_FILTER: None,
    FaultKind.CUT_OFF: "0.",
    FaultKind.REFUSAL: REFUSAL,
    FaultKind.REFUSAL_TEXT: REFUSAL,
    FaultKind.PROSE: PROSE.format(1.0),
    **{kind: of_score(1.0) for kind, of_score in SCORE_IS.items()},
    FaultKind.SCORE_OUT_OF_RANGE: 1e300,
}
"""What a fault puts in the place of every number of the first item. The others are about the id of a verdict, which a
number does not have.
"""


RUN_PATH = "/run_code"


@dataclass(frozen=True)
class RunCall(JudgeCall):
    """A request to run a program, as the scorer gets it. `parameters` has all fields of the body."""

    @property
    def code(self) -> str:
        return str(self.parameters["code"])

    @property
    def stdin(self) -> str:
        return str(self.parameters.get("stdin") or "")


def read_run_call(body: bytes) -> RunCall:
    """Read the body of a request. Raises `Refused` with the mistake."""
    fields = read_object(body)
    for name in ("code", "language"):
        if not isinstance(fields.get(name), str):
            raise Refused(422, f"{name!r} must be a string")
    return RunCall("sandbox", [], fields)


def ran(stdout: str = "", *, ended: str = "finished", stderr: str = "") -> dict[str, Any]:
    """Return SandboxFusion's reply for a program that printed `stdout` and `ended` so: `finished`, `run_error`,
    `timeout`, `compile_error` or `sandbox_error`. Raises KeyError for another word.
    """
    code = {"finished": 0, "run_error": 1, "compile_error": 1, "timeout": None, "sandbox_error": None}[ended]
    status = "Finished" if code is not None else "Error" if ended == "sandbox_error" else "TimeLimitExceeded"
    command = {"status": status, "execution_time": 0.1, "return_code": code, "stdout": stdout, "stderr": stderr}
    outer = {"finished": "Success", "sandbox_error": "SandboxError"}.get(ended, "Failed")
    compiled = ended == "compile_error"
    return {
        "status": outer,
        "message": stderr if ended == "sandbox_error" else "",
        "compile_result": command if compiled else None,
        "run_result": None if compiled else command,
        "executor_pod_name": None,
        "files": {},
    }


def run_reply(call: JudgeCall, answers: Sequence[Answer], fault: FaultKind | None, number: int) -> JudgeReply:
    """The reply for a scorer's answer: what the program prints, a text or a number; or the whole reply, a mapping.

    A fault of the stage "verdict" is one of the sandbox: it could not run the program, or a field is wrong.
    """
    answer = answers[0]
    fields = dict(answer) if isinstance(answer, Mapping) else ran(str(answer))
    if fault is not None and fault.stage == "verdict":
        flaw = _FLAWS.get(fault)
        fields = ran(ended="sandbox_error", stderr=fault.says) if flaw is None else {**fields, **flaw}
    return JudgeReply(fields)


_FLAWS: Mapping[FaultKind, Mapping[str, Any]] = {
    FaultKind.NULL_CONTENT: {"run_result": None},
    FaultKind.CUT_OFF: {"run_result": {"status": "Finished", "return_code": 0}},
    FaultKind.SCORE_STRING: {"run_result": {"status": "Finished", "return_code": "0", "stdout": ""}},
    FaultKind.SCORE_BOOL: {"run_result": {"status": "Finished", "return_code": False, "stdout": ""}},
    FaultKind.TWO_VERDICTS: {"status": "Failed"},
}
