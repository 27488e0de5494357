"""PPO's critic on the CPU.

verl always loads the critic's model with `attn_implementation="flash_attention_2"`, and reports the failure as a model
without a value head ("please install trl"). The engine looks the loader up by name when it builds a critic, so it can
be replaced in its module.
"""

from __future__ import annotations

from typing import Any

import torch
import verl.utils.model as verl_model


def load_value_model(local_path: str, torch_dtype: torch.dtype, model_config: Any, trust_remote_code: bool) -> Any:
    """The model of a folder as a token classifier, whose one label per token is the value, with plain attention."""
    from transformers import AutoModelForTokenClassification

    return AutoModelForTokenClassification.from_pretrained(
        local_path,
        dtype=torch_dtype,
        config=model_config,
        attn_implementation="sdpa",
        trust_remote_code=trust_remote_code,
    )


def install() -> None:
    """Let the critics of this process be loaded by `load_value_model`."""
    verl_model.load_valuehead_model = load_value_model
