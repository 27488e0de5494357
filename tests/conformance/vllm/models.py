"""Makes tiny models with random weights: a vocabulary of bytes, two layers, 1 MB each. They know nothing; what matters
is that vLLM and transformers compute the same numbers from the same files.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

NAMES = ("one_logit", "two_labels", "process", "chat", "one_logit_b", "one_logit_c")
STEP_TOKEN = "<extra_0>"
_SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>", STEP_TOKEN)
_CHAT_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
_WORDS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_TEXTS = ("The answer to the question is right.", "First we add, then we multiply:\n\n17 + 25 = 42", '{"score": 7}')


def make_models(folder: Path) -> None:
    """Write the models of `NAMES` into `folder`, each into a folder of its own."""
    import transformers

    tokenizer = _tokenizer()
    one_logit = (transformers.Qwen2ForSequenceClassification, {"num_labels": 1})
    kinds: Mapping[str, tuple[Any, dict[str, Any]]] = {
        "one_logit": one_logit,
        # The same model with other weights.
        "one_logit_b": one_logit,
        "one_logit_c": one_logit,
        "two_labels": (
            transformers.Qwen2ForSequenceClassification,
            {"num_labels": 2, "id2label": {0: "bad", 1: "good"}, "label2id": {"bad": 0, "good": 1}},
        ),
        "process": (transformers.Qwen2ForTokenClassification, {"num_labels": 2}),
        "chat": (transformers.Qwen2ForCausalLM, {}),
    }
    for seed, name in enumerate(NAMES):
        kind, settings = kinds[name]
        transformers.set_seed(seed)
        # vLLM's kernels for the CPU take heads of 64 numbers, not of any size. With the usual deviation of weights,
        # 0.02, all texts have nearly the same logits.
        config = transformers.Qwen2Config(
            vocab_size=len(tokenizer),
            hidden_size=128,
            intermediate_size=384,
            num_hidden_layers=2,
            num_attention_heads=2,
            num_key_value_heads=1,
            max_position_embeddings=4096,
            initializer_range=0.12,
            tie_word_embeddings=True,
            eos_token_id=tokenizer.eos_token_id,
            pad_token_id=tokenizer.pad_token_id,
            **settings,
        )
        kind(config).save_pretrained(folder / name)
        tokenizer.save_pretrained(folder / name)


def _tokenizer() -> Any:
    import tokenizers
    import transformers
    from tokenizers import decoders, normalizers, pre_tokenizers, trainers
    from tokenizers.models import BPE

    model = tokenizers.Tokenizer(BPE())
    # Qwen 2's own: transformers uses it for this architecture, whatever the file says.
    model.normalizer = normalizers.NFC()
    words = pre_tokenizers.Split(tokenizers.Regex(_WORDS), behavior="isolated")
    model.pre_tokenizer = pre_tokenizers.Sequence(
        [words, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
    )
    model.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=512, special_tokens=list(_SPECIAL), initial_alphabet=alphabet, show_progress=False
    )
    model.train_from_iterator(_TEXTS * 40, trainer)
    tokenizer = transformers.PreTrainedTokenizerFast(
        tokenizer_object=model, eos_token="<|im_end|>", pad_token="<|endoftext|>"
    )
    tokenizer.chat_template = _CHAT_TEMPLATE
    return tokenizer


class Truth:
    """The logits of a model as transformers computes them, in float32."""

    def __init__(self, folder: Path) -> None:
        import torch
        import transformers

        architecture = json.loads((folder / "config.json").read_text())["architectures"][0]
        self._torch = torch
        self.tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
        self._model = getattr(transformers, architecture).from_pretrained(folder, dtype=torch.float32).eval()

    def logits(self, text: str) -> Any:
        """The logits of a text: a list, or for a token classifier a list for every token."""
        ids = self.tokenizer(text, add_special_tokens=False)["input_ids"]
        with self._torch.no_grad():
            return self._model(self._torch.tensor([ids])).logits[0].tolist()

    def spans(self, text: str) -> list[tuple[int, int]]:
        """The characters of each token."""
        encoded = self.tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)
        return [(start, end) for start, end in encoded["offset_mapping"]]

    def rendered(self, question: str, response: str) -> str:
        """What a model sees of a question and its response."""
        messages = [{"role": "user", "content": question}, {"role": "assistant", "content": response}]
        return str(self.tokenizer.apply_chat_template(messages, tokenize=False))
