"""The tokens of a response: which turns they are, and which token a part of the reward belongs to.

verl passes a reward manager the tokens of a response, but not which of them the policy wrote. The agent loop workers
know, so ours tell it (`telling_turns`), in a run whose judges read turns. A judge tells where steps and turns end in
characters, and a trainer adds rewards to tokens. A character belongs to the token that completes it.
"""

from __future__ import annotations

import functools
import json
from bisect import bisect_left
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from qreward_plugins import Config
from qreward_plugins.adapters import ResponseTurn, judge_kind_of, messages_of

POLICY = "qreward_policy"
"""The key of an agent loop's `extra_fields` for the spans of tokens that the policy wrote."""

Span = tuple[int, int]
"""The first token, and the one after the last."""


class ResponseTokens:
    """The tokens of the response of one row (`DataProtoItem`). `ids` are without padding. Decoding takes long: not on
    the event loop.
    """

    def __init__(self, item: Any, ids: Any, tokenizer: Any) -> None:
        self._ids = ids
        self._tokenizer = tokenizer
        self._policy = _policy_spans(item, len(ids))

    @functools.cached_property
    def text(self) -> str:
        """The response as verl's own managers decode it."""
        return self._decoded(len(self._ids))

    def turns(self) -> tuple[ResponseTurn, ...]:
        """The turns of the policy, with what tools and users said between them; empty if there is one turn.

        What is between is read with the chat template of the model, if it is a known one. Otherwise it is one message
        of a tool.
        """
        if len(self._policy) < 2:
            return ()
        turns: list[ResponseTurn] = []
        before = 0
        for start, end in (*self._policy, (len(self._ids), len(self._ids))):
            turns += self._between(before, start)
            if start < end:
                content = str(self._tokenizer.decode(self._ids[start:end], skip_special_tokens=True))
                turns.append(ResponseTurn(role="assistant", content=content, end=self._end(end)))
            before = end
        return tuple(turns)

    @property
    def last(self) -> int:
        """The index of the last token; 0 if there is none."""
        return max(len(self._ids) - 1, 0)

    def placed(self, dense: Iterable[tuple[int, float]]) -> list[tuple[int, float]]:
        """What to add to the rewards of tokens: pairs of token and number. `dense` is that of a verdict, whose whole
        score is at the last token, from where these numbers take it away.
        """
        known = {self._end(end): end - 1 for _, end in self._policy}
        added = [(self._trained(known[end] if end in known else self._token(end)), reward) for end, reward in dense]
        return [*added, (self.last, -sum(reward for _, reward in added))] if added else []

    def _between(self, start: int, end: int) -> list[ResponseTurn]:
        ids, place = self._ids[start:end], self._end(end)
        text = str(self._tokenizer.decode(ids, skip_special_tokens=True)).strip()
        if not text:
            return []
        written = str(self._tokenizer.decode(ids, skip_special_tokens=False))
        messages = messages_of(written)
        if messages == [{"role": "user", "content": written}]:
            # Of a chat template that is not known.
            return [ResponseTurn(role="tool", content=text, end=place)]
        return [ResponseTurn(role=message["role"], content=message["content"], end=place) for message in messages]

    def _decoded(self, count: int) -> str:
        return str(self._tokenizer.decode(self._ids[:count], skip_special_tokens=True))

    def _end(self, count: int) -> int:
        """The characters in the first `count` tokens."""
        whole = len(self.text)
        return whole if count >= len(self._ids) else min(len(self._decoded(count)), whole)

    def _token(self, end: int) -> int:
        """The token that completes the character before `end`; from the end of the text on, the last one."""
        if end >= len(self.text):
            return self.last
        return min(self.last, bisect_left(range(1, self.last + 2), end, key=lambda count: len(self._decoded(count))))

    def _trained(self, token: int) -> int:
        """The token itself, or the one before it that the policy wrote: verl trains no others."""
        if not self._policy:
            return token
        started = [span for span in self._policy if span[0] <= token] or self._policy[:1]
        start, end = started[-1]
        return max(start, min(token, end - 1))


def add_parts(data: Any, parts: Mapping[int, str]) -> None:
    """Add to the rewards of tokens what `ResponseTokens.placed` says, as JSON, by rows."""
    found = {row: json.loads(written) for row, written in parts.items() if written}
    if not found:
        return
    for name in ("token_level_scores", "token_level_rewards"):
        # They may be one tensor.
        data.batch[name] = data.batch[name].clone()
        for row, added in found.items():
            for token, reward in added:
                data.batch[name][row, token] += reward


def reads_turns(settings: Config) -> bool:
    """Whether a judge says what each step or turn of a response is worth."""
    return any(judge_kind_of(judge).splits(judge) for judge in settings.judges.values())


def telling_turns(start: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap `AgentLoopManager._init_agent_loop_workers`, so that its workers tell which tokens the policy wrote."""

    @functools.wraps(start)
    async def started(self: Any, *args: Any, **kwargs: Any) -> Any:
        worker = self.agent_loop_workers_class
        actor = getattr(worker, "__ray_metadata__", None)
        if actor is None:
            self.agent_loop_workers_class = _telling(worker)
        else:
            import ray

            self.agent_loop_workers_class = ray.remote(_telling(actor.modified_class))
        return await start(self, *args, **kwargs)

    return started


def _telling(worker: type[Any]) -> type[Any]:
    # Ray sends a class that is made here by value, so its workers need not have imported this module.
    class TellingAgentLoopWorker(worker):  # type: ignore[misc]
        async def _compute_score(self, outputs: Any, *args: Any, **kwargs: Any) -> Any:
            # Older versions of verl pass a single output.
            each = outputs if isinstance(outputs, list) else [outputs]
            for output in each:
                output.extra_fields[POLICY] = _spans(output.response_mask)
            try:
                return await super()._compute_score(outputs, *args, **kwargs)
            finally:
                for output in each:
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
