"""Turns verl's rollouts into samples: one row of a `DataProto` becomes one `Sample`.

A reward function gets the same `extra_info` as from verl's own managers, key by key
(verl/experimental/reward_loop/reward_manager/naive.py), so that it works here as it did there.

verl passes a reward manager the tokens of a response (`ResponseTokens`), but not which of them the policy wrote. The
agent loop workers know, so ours tell it (`tell_turns`), in a run whose judges read turns. A judge tells where steps and
turns end in characters, and a trainer adds rewards to tokens. A character belongs to the token that completes it.
"""

from __future__ import annotations

import itertools
import math
import os
from bisect import bisect_left
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cached_property
from typing import Any

from qreward_plugins import Cause, Config, Failed, InputError, Message, Sample
from qreward_plugins.adapters import (
    Image,
    ResponseTurn,
    Unreadable,
    described_error,
    mapping_or_unreadable,
    messages_of,
    name_or_unreadable,
    read_or_unreadable,
    tells_steps,
)

from .rewards import plain

VALIDATION = "qreward_validation"
"""The key in `extra_info` with which `metrics` marks validation rows. verl does not mark them."""

RESPONSE_IMAGES = "qreward_images"
"""The key of an agent loop's `extra_fields` for images that belong to the response."""

POLICY = "qreward_policy"
"""The key of an agent loop's `extra_fields` for the spans of tokens that the policy wrote."""

Span = tuple[int, int]
"""The first token, and the one after the last."""

_FEW_TOKENS = 4096
_BLOCK = 128
"""Tokens from one border to the next. Decoding from the start for each token would take seconds."""
_CONTEXT = 8
"""Tokens that are decoded before a border: some tokenizers write the first token in another way."""

_numbers = itertools.count()


def to_sample(item: Any, tokens: ResponseTokens, *, data_source_column: str = "data_source") -> Sample:
    """Turn one row with the `tokens` of its response into a sample.

    Images of the prompt are parts of `raw_prompt` (utils/dataset/rl_dataset.py: `_build_messages`). verl does not pass
    the images of tools to reward managers; an agent loop of your own can, in `extra_fields["qreward_images"]`.
    """
    columns: Mapping[str, Any] = item.non_tensor_batch
    uid, source = columns.get("uid"), columns.get(data_source_column, "")
    return Sample(
        messages=read_or_unreadable(lambda: _messages(item, tokens)),
        response=tokens.text,
        ground_truth=read_or_unreadable(lambda: _mapping(columns, "reward_model").get("ground_truth")),
        # None is no name, and fails this sample.
        data_source=source if source is None else name_or_unreadable(source),  # type: ignore[arg-type]
        **_place(columns),
        extras=read_or_unreadable(lambda: _extras(columns)),
        id=None if uid is None else f"{uid}/{_session(columns)}",
        response_images=read_or_unreadable(lambda: _response_images(columns)),
        turns=tokens.turns(),
    )


def unreadable(item: Any, error: BaseException) -> tuple[Sample, Failed]:
    """The failure of a row for which `to_sample` raised `error`, and a sample with its group, step and split."""
    detail = f"the rollout cannot be read: {described_error(error)}"
    return Sample(messages=[], response="", **_place(item.non_tensor_batch)), Failed(Cause.INFRA, "input", detail)


def _response_images(columns: Mapping[str, Any]) -> list[Image]:
    own = columns.get("tool_extra_fields")
    added = own.get(RESPONSE_IMAGES) if isinstance(own, Mapping) else None
    return [Image.of(image) for image in added or ()]


def _extras(columns: Mapping[str, Any]) -> dict[str, Any]:
    extras = {key: value for key, value in _mapping(columns, "extra_info").items() if key != VALIDATION}
    tools = _mapping(columns, "tool_extra_fields").items()
    extras.update((key, value) for key, value in tools if key not in (RESPONSE_IMAGES, POLICY))
    extras["num_turns"] = plain(columns.get("__num_turns__"))
    extras["rollout_reward_scores"] = columns.get("reward_scores") or {}
    return extras


def _mapping(columns: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    """The mapping in a column, empty for None. Raises `InputError` for another value."""
    mapping = mapping_or_unreadable(columns.get(name))
    if isinstance(mapping, Unreadable):
        raise InputError(mapping.problem)
    return mapping


def _place(columns: Mapping[str, Any]) -> dict[str, Any]:
    """The group, the step and the split of a row."""
    uid, step, info = columns.get("uid"), plain(columns.get("global_steps")), columns.get("extra_info")
    return {
        "group_id": None if uid is None else str(uid),
        "step": step if isinstance(step, int) else None,
        "split": "val" if isinstance(info, Mapping) and info.get(VALIDATION) else None,
    }


def _session(columns: Mapping[str, Any]) -> str:
    """What tells a sample from its siblings: V1 numbers its sessions, the other trainers number nothing."""
    session = plain(columns.get("session_id"))
    return f"{os.getpid()}.{next(_numbers)}" if session is None else str(session)


def _messages(item: Any, tokens: ResponseTokens) -> list[Message]:
    columns: Mapping[str, Any] = item.non_tensor_batch
    for column in ("raw_prompt", "prompt"):
        prompt = columns.get(column)
        if isinstance(prompt, str):
            return [{"role": "user", "content": prompt}]
        if prompt is not None and len(prompt):
            return [dict(message) for message in prompt]  # type: ignore[misc]
    ids = item.batch["prompts"]
    mask = item.batch["attention_mask"][: ids.shape[-1]].bool()
    return [{"role": "user", "content": tokens.decode(ids[mask])}]


class ResponseTokens:
    """The tokens of the response of one row (`DataProtoItem`), without padding."""

    def __init__(self, item: Any, tokenizer: Any) -> None:
        # If one trajectory has several outputs, verl pads them to the right, and the attention mask does not line up
        # with the responses. Then `response_len` is right. Older versions lack it, but pass single outputs only.
        ids, length = item.batch["responses"], item.non_tensor_batch.get("response_len")
        if length is None:
            length = item.batch["attention_mask"][-ids.shape[-1] :].sum()
        self._ids = ids[: int(length)]
        self._tokenizer = tokenizer
        self._policy = _policy_spans(item, len(self._ids))

    @property
    def few(self) -> bool:
        """Whether they are decoded in about a millisecond. A trip to a thread takes nearly as long, because both
        threads want Python's lock.
        """
        return len(self._ids) <= _FEW_TOKENS and len(self._policy) < 2

    @cached_property
    def text(self) -> str:
        """The response as verl's own managers decode it."""
        return self._decoded(0, len(self._ids))

    def turns(self) -> tuple[ResponseTurn, ...]:
        """The turns of the policy, with what tools and users said between them; empty if it wrote all in one turn.

        What is between is one message, because a tool may repeat what looks like another turn. Its role is that with
        which the chat template begins it, if that is a known one, and a tool's otherwise.
        """
        if list(self._policy) == [(0, len(self._ids))]:
            return ()
        turns: list[ResponseTurn] = []
        before = 0
        for start, end in (*self._policy, (len(self._ids), len(self._ids))):
            turns += self._between(before, start)
            if start < end:
                turns.append(ResponseTurn(role="assistant", content=self._decoded(start, end), end=self._end(end)))
            before = end
        return tuple(turns) if self._policy else ()

    @property
    def last(self) -> int:
        """The index of the last token; 0 if there is none."""
        return max(len(self._ids) - 1, 0)

    def placed(self, dense: Iterable[tuple[int, float]], score: float) -> list[tuple[int, float]]:
        """What to add to the rewards of tokens: pairs of token and number. `dense` and `score` are those of a verdict.
        verl puts the whole score at the last token. These numbers take it away from there, and put what the parts leave
        of it at the last token of the policy.
        """
        # A turn without words ends where the one before it does. Each adds to its own last token.
        known: dict[int, list[int]] = {}
        for _, end in self._policy:
            known.setdefault(self._end(end), []).append(end - 1)
        turns = {end: itertools.cycle(tokens) for end, tokens in known.items()}
        added = [
            (self._trained(next(turns[end]) if end in turns else self._token(end)), reward) for end, reward in dense
        ]
        if not added:
            return []
        rest = score - math.fsum(reward for _, reward in added)
        return [*added, (self._trained(self.last), rest), (self.last, -score)]

    def _between(self, start: int, end: int) -> list[ResponseTurn]:
        text = self._decoded(start, end).strip()
        if not text:
            return []
        written = str(self._tokenizer.decode(self._ids[start:end], skip_special_tokens=False))
        messages = messages_of(written)
        role, place = "tool", self._end(end)
        if messages != [{"role": "user", "content": written}]:
            # The template's own words are the first role, and the role of the policy at the end.
            text = "\n".join(message["content"] for message in messages)
            role = messages[0]["role"] if messages[0]["role"] not in ("assistant", "system") else role
        return [ResponseTurn(role=role, content=text, end=place)]

    def decode(self, ids: Any) -> str:
        """The text of any tokens, as verl's own managers decode them."""
        return str(self._tokenizer.decode(ids, skip_special_tokens=True))

    def _decoded(self, start: int, end: int) -> str:
        return self.decode(self._ids[start:end])

    def _added(self, start: int, end: int) -> int:
        """The characters that the tokens from `start` to `end` complete."""
        context = max(0, start - _CONTEXT)
        # A character of which tokens are missing is decoded as U+FFFD.
        to_end, to_start = (self._decoded(context, each).rstrip("\ufffd") for each in (end, start))
        return len(to_end) - len(to_start)

    @cached_property
    def _borders(self) -> Sequence[int]:
        """The characters before each block of tokens."""
        starts = range(0, len(self._ids), _BLOCK)
        return list(itertools.accumulate((self._added(start, start + _BLOCK) for start in starts), initial=0))

    def _end(self, count: int) -> int:
        """The characters in the first `count` tokens."""
        whole = len(self.text)
        if count >= len(self._ids):
            return whole
        block = count // _BLOCK
        return min(self._borders[block] + self._added(block * _BLOCK, count), whole)

    def _token(self, end: int) -> int:
        """The token that completes the character before `end`; from the end of the text on, the last one."""
        if end >= len(self.text):
            return self.last
        return min(self.last, bisect_left(range(1, self.last + 2), end, key=self._end))

    def _trained(self, token: int) -> int:
        """The token itself, or the one before it that the policy wrote: verl trains no others."""
        if not self._policy:
            return token
        started = [span for span in self._policy if span[0] <= token] or self._policy[:1]
        start, end = started[-1]
        return max(start, min(token, end - 1))


def needs_policy_spans(settings: Config) -> bool:
    """Whether agent loops must tell which tokens the policy wrote: a judge scores turns or steps, or a reward server
    may.
    """
    return settings.engine.server is not None or tells_steps(settings)


async def tell_turns(start: Callable[..., Any], self: Any) -> None:
    """Wraps `AgentLoopManager._init_agent_loop_workers`, so that its workers tell which tokens the policy wrote."""
    worker = self.agent_loop_workers_class
    actor = getattr(worker, "__ray_metadata__", None)
    if actor is None:
        self.agent_loop_workers_class = _telling(worker)
    else:
        import ray

        options = getattr(worker, "_default_options", None)
        make = ray.remote(**options) if options else ray.remote
        self.agent_loop_workers_class = make(_telling(actor.modified_class))
    await start(self)


def _telling(worker: type[Any]) -> type[Any]:
    # Ray sends a class that is made here by value, so its workers need not have imported this module.
    class TellingAgentLoopWorker(worker):  # type: ignore[misc]
        async def _compute_score(self, outputs: Any, *args: Any, **kwargs: Any) -> Any:
            for output in outputs:
                output.extra_fields[POLICY] = _spans(output.response_mask)
            try:
                return await super()._compute_score(outputs, *args, **kwargs)
            finally:
                for output in outputs:
                    output.extra_fields.pop(POLICY, None)

    return TellingAgentLoopWorker


def _policy_spans(item: Any, count: int) -> Sequence[Span]:
    told = item.non_tensor_batch.get("tool_extra_fields")
    if isinstance(told, Mapping) and POLICY in told:
        spans = told[POLICY]
    elif "response_mask" in item.batch.keys():  # noqa: SIM118 (a TensorDict refuses `in`)
        spans = _spans(item.batch["response_mask"].tolist())
    else:
        spans = [(0, count)]
    return [(start, min(end, count)) for start, end in spans if start < count]


def _spans(mask: Iterable[int]) -> list[Span]:
    """The spans of ones."""
    found: list[Span] = []
    for place, written in enumerate(mask):
        if written and found and found[-1][1] == place:
            found[-1] = (found[-1][0], place + 1)
        elif written:
            found.append((place, place + 1))
    return found
