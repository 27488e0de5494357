"""slime's `Sample`, field for field, for tests without slime.

Lists take the place of slime's tensors. The replays of top-p token ids and of routed experts are missing, because no
reward hook uses them; their fields exist and stay None.
"""

from __future__ import annotations

import enum
from argparse import Namespace
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any

_FINISHED = {"stop": "completed", "length": "truncated", "abort": "aborted"}


@dataclass
class SlimeSample:
    """slime's `Sample`: one rollout, with the names, types and defaults of slime v0.3.1.

    `index` counts all samples, `group_index` the prompts; both are None wherever slime leaves them None (`group_index`
    in an evaluation). `reward` is None until there is one. `loss_mask` has one 0 or 1 for each of the
    `response_length` tokens; None means that all count. `non_generation_time` is in seconds.
    """

    class Status(enum.Enum):
        """How far the generation came. No part of slime's rollout sets `FAILED`."""

        PENDING = "pending"
        COMPLETED = "completed"
        TRUNCATED = "truncated"
        ABORTED = "aborted"
        FAILED = "failed"

    @dataclass
    class SpecInfo:
        """Counts of speculative decoding."""

        spec_accept_token_num: int = 0
        spec_draft_token_num: int = 0
        spec_verify_ct: int = 0
        completion_token_num: int = 0

    @dataclass
    class PrefixCacheInfo:
        """Counts of the prefix cache, in tokens."""

        cached_tokens: int = 0
        total_prompt_tokens: int = 0

    group_index: int | None = None
    index: int | None = None
    rollout_id: int | None = None
    prompt: str | list[dict[str, Any]] = ""
    tokens: list[int] = field(default_factory=list)
    multimodal_inputs: dict[str, Any] | None = None
    multimodal_train_inputs: dict[str, Any] | None = None
    multimodal_train_input_id: str | None = None
    apply_chat_template_kwargs: dict[str, Any] = field(default_factory=dict)
    response: str = ""
    response_length: int = 0
    label: Any = None
    reward: Any = None
    loss_mask: list[int] | None = None
    weight_versions: list[str] = field(default_factory=list)
    rollout_log_probs: list[float] | None = None
    rollout_top_p_token_ids: list[int] | None = None
    rollout_top_p_token_offsets: list[int] | None = None
    rollout_routed_experts: list[list[int]] | None = None
    remove_sample: bool = False
    teacher_log_probs: list[float] | None = None
    status: Status = Status.PENDING
    metadata: dict[str, Any] = field(default_factory=dict)
    generate_function_path: Any = None
    custom_rm_path: Any = None
    train_metadata: dict[str, Any] | None = None
    session_id: str | None = None
    non_generation_time: float = 0.0
    spec_info: SpecInfo = field(default_factory=SpecInfo)
    prefix_cache_info: PrefixCacheInfo = field(default_factory=PrefixCacheInfo)

    def get_reward_value(self, args: Namespace) -> Any:
        """The number that trains: the reward, or its entry `args.reward_key` if that is set.

        Raises the errors of indexing the reward: `TypeError` for None or a number, `KeyError` for a missing key.
        """
        return self.reward[args.reward_key] if args.reward_key else self.reward

    @property
    def effective_response_length(self) -> int:
        """How many tokens of the response are trained on, before `remove_sample` is applied."""
        return self.response_length if self.loss_mask is None else sum(self.loss_mask)

    def append_response_tokens(
        self,
        args: Namespace | None = None,
        *,
        tokens: Sequence[int] | None = None,
        log_probs: Sequence[float] | None = None,
        trainable: bool = True,
        meta_info: Mapping[str, Any] | None = None,
        text: str | None = None,
        update_terminal_info: bool = True,
    ) -> None:
        """Append tokens of the policy, or with `trainable=False` of a tool, and extend mask and log-probs.

        `meta_info` is from the inference engine. Its `finish_reason` ("stop", "length" or "abort", in a mapping
        with the key `type`) sets the status. Raises `ValueError` for log-probs that are missing, superfluous or of
        another length than the tokens, as slime does.
        """
        added = [int(token) for token in tokens or ()]
        scores = None if log_probs is None else [float(score) for score in log_probs]
        if scores is not None and len(scores) != len(added):
            raise ValueError(f"{len(scores)} log_probs for {len(added)} tokens: give one for each token")
        if added and trainable and scores is None:
            raise ValueError("trainable response tokens need rollout log-probs: pass log_probs, or trainable=False")
        if added and not trainable:
            if scores is not None:
                raise ValueError("tokens that are not trained have no rollout log-probs: omit log_probs")
            scores = [0.0] * len(added)
        self.response += text or ""
        before = self.response_length
        if added:
            self.tokens = [*self.tokens, *added]
            self.response_length += len(added)
            self.loss_mask = [
                *([1] * before if self.loss_mask is None else self.loss_mask),
                *[int(trainable)] * len(added),
            ]
        if scores is not None:
            if self.rollout_log_probs is None and trainable and before:
                raise ValueError("this sample has response tokens without rollout_log_probs: none can be appended")
            self.rollout_log_probs = [*(self.rollout_log_probs or [0.0] * before), *scores]
        if meta_info is not None and update_terminal_info and "finish_reason" in meta_info:
            self._finish(meta_info)
        for name, values in (("loss_mask", self.loss_mask), ("rollout_log_probs", self.rollout_log_probs)):
            if values is not None and len(values) != self.response_length:
                raise ValueError(f"{name} has {len(values)} entries for {self.response_length} response tokens")

    def _finish(self, meta_info: Mapping[str, Any]) -> None:
        self.prefix_cache_info.cached_tokens += meta_info.get("cached_tokens", 0)
        self.prefix_cache_info.total_prompt_tokens += meta_info.get("prompt_tokens", 0)
        if "weight_version" in meta_info:
            self.weight_versions.append(meta_info["weight_version"])
        reason = meta_info["finish_reason"]["type"]
        if reason in _FINISHED:
            self.status = SlimeSample.Status(_FINISHED[reason])

    def to_dict(self) -> dict[str, Any]:
        """All attributes as plain data (those that a hook added too), as slime writes them to its debug files."""
        return {
            **vars(self),
            "status": self.status.value,
            "spec_info": dict(vars(self.spec_info)),
            "prefix_cache_info": dict(vars(self.prefix_cache_info)),
        }

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> SlimeSample:
        """The inverse of `to_dict`. Raises `KeyError` without a status, `ValueError` for an unknown one."""
        plain = {
            **data,
            "status": cls.Status(data["status"]),
            "spec_info": cls.SpecInfo(**data.get("spec_info", {})),
            "prefix_cache_info": cls.PrefixCacheInfo(**data.get("prefix_cache_info", {})),
        }
        names = {entry.name for entry in fields(cls)}
        sample = cls(**{name: value for name, value in plain.items() if name in names})
        for name, value in plain.items():
            if name not in names:
                setattr(sample, name, value)
        return sample
