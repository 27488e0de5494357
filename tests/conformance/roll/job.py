"""A job's configuration and tokenizer: ROLL's own dataclasses, filled by Hydra as ROLL's start scripts fill them."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from dacite import Config, from_dict
from hydra import compose, initialize_config_dir
from omegaconf import OmegaConf
from roll.pipeline.agentic.agentic_config import AgenticConfig
from roll.pipeline.rlvr.rlvr_config import RLVRConfig
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from ..judges import WORDS

CONFIGS = Path(__file__).parent / "config"


def make_tokenizer(folder: Path) -> Path:
    """Write a tokenizer with one token a word to `folder`, in the look of a tiny model, and return it."""
    words = Tokenizer(models.WordLevel({word: number for number, word in enumerate(WORDS)}, unk_token="<unk>"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=words,
        unk_token="<unk>",
        pad_token="<pad>",
        eos_token="<eos>",
        padding_side="left",
        chat_template="{% for message in messages %}{{ message['content'] }} {% endfor %}",
    )
    tokenizer.save_pretrained(folder)
    (folder / "config.json").write_text(json.dumps({"model_type": "llama", "vocab_size": len(WORDS)}))
    return folder


def make_config(keys: Mapping[str, Any], tokenizer: Path, output: Path, *, agentic: bool = False) -> Any:
    """The smallest run, with a scenario's keys laid over it. Raises what ROLL raises."""
    output.mkdir(parents=True, exist_ok=True)
    base = _compose(CONFIGS, "agentic" if agentic else "rlvr")
    OmegaConf.set_struct(base, False)  # dacite finds the keys that ROLL does not have
    whole = OmegaConf.merge(base, {"pretrain": str(tokenizer), "output_dir": str(output)}, keys)
    kind = AgenticConfig if agentic else RLVRConfig
    return from_dict(kind, OmegaConf.to_container(whole, resolve=True), Config(strict=True))


def _compose(folder: Path, name: str) -> Any:
    with initialize_config_dir(str(folder.resolve()), version_base=None):
        return compose(name)
