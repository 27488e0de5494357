"""What this recipe trains: sums from reasoning-gym, and a model of 130,000 parameters made from nothing to answer them.

A pretrained model would be a download, and too slow for a laptop, so one is built here and warmed up for a few seconds
on right answers: long enough to answer in the right form and to have a vague idea of the sums, and not longer. What it
knows after that, it has from the reward: the scores of the judges are all that the reinforcement learning sees.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast, Qwen2ForCausalLM

DATA_SOURCE = "reasoning_gym/chain_sum"
END, PAD, START = "<|im_end|>", "<|endoftext|>", "<|im_start|>"
_CHAT_TEMPLATE = (
    "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\\n' + m['content'] + '<|im_end|>\\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)
# A number is one token with its sign and the space before it: the model learns sums of numbers, not of digits.
_PIECES = r" ?-?\d+| ?[A-Za-z]+| ?[^\sA-Za-z\d]|\s+"
_NO_LABEL = -100


@dataclass(frozen=True)
class Sizes:
    """Sizes of the data set, the model and its warm-up; `seed` fixes the questions, the examples and the weights."""

    seed: int = 0
    train_questions: int = 8
    val_questions: int = 8
    hidden_size: int = 64
    layers: int = 2
    heads: int = 4
    warm_up_steps: int = 90
    warm_up_batch: int = 64
    warm_up_lr: float = 1e-2


@dataclass(frozen=True)
class Question:
    """One task: its text and the right answer."""

    text: str
    answer: int

    @property
    def worked(self) -> str:
        return f"The answer is {self.answer}."


@dataclass(frozen=True)
class Assets:
    """Where the parts of a prepared recipe lie."""

    train: Path
    val: Path
    model: Path
    tokenizer: Path


def questions(seed: int) -> list[Question]:
    """All sums and differences of two digits that reasoning-gym asks for, in an order fixed by the seed."""
    import reasoning_gym

    size = 2_000
    data = reasoning_gym.create_dataset(
        "chain_sum", size=size, seed=seed, min_terms=2, max_terms=2, min_digits=1, max_digits=1
    )
    found = {str(item["question"]): int(item["answer"]) for item in (data[index] for index in range(size))}
    return [Question(text, answer) for text, answer in found.items()]


def prepare(folder: Path, sizes: Sizes = Sizes()) -> Assets:
    """Write the data sets (parquet, verl's columns), the tokenizer and the warmed-up model to `folder`."""
    import pandas
    import torch
    from transformers.utils import logging

    torch.set_num_threads(1)
    assets = Assets(folder / "train.parquet", folder / "val.parquet", folder / "model", folder / "tokenizer")
    folder.mkdir(parents=True, exist_ok=True)
    everything = questions(sizes.seed)
    train = everything[: sizes.train_questions]
    val = everything[sizes.train_questions :][: sizes.val_questions]
    pandas.DataFrame(rows(train, "train")).to_parquet(assets.train)
    pandas.DataFrame(rows(val, "val")).to_parquet(assets.val)
    tokenizer = build_tokenizer([f"{question.text}\n{question.worked}" for question in everything])
    model = build_model(sizes, tokenizer)
    warm_up(model, tokenizer, sizes, everything)
    logging.disable_progress_bar()
    tokenizer.save_pretrained(assets.tokenizer)
    model.save_pretrained(assets.model)
    return assets


def rows(items: Sequence[Question], split: str) -> list[dict[str, Any]]:
    """The rows of verl's data set for these questions."""
    return [
        {
            "data_source": DATA_SOURCE,
            "prompt": [{"role": "user", "content": item.text}],
            "ability": "math",
            "reward_model": {"style": "rule", "ground_truth": str(item.answer)},
            "extra_info": {"index": index, "split": split},
        }
        for index, item in enumerate(items)
    ]


def build_tokenizer(texts: list[str]) -> PreTrainedTokenizerFast:
    """A byte-level BPE tokenizer learned from `texts`: any text survives a round trip, and their words are one
    token.
    """
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(_PIECES), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=600,
        special_tokens=[PAD, START, END],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator([*texts, "system user assistant"], trainer)
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token=END,
        pad_token=PAD,
        additional_special_tokens=[START],
        clean_up_tokenization_spaces=False,
    )
    fast.chat_template = _CHAT_TEMPLATE
    return fast


def build_model(sizes: Sizes, tokenizer: PreTrainedTokenizerFast) -> Qwen2ForCausalLM:
    """A Qwen2 with random weights."""
    import torch
    from transformers import Qwen2Config, Qwen2ForCausalLM

    torch.manual_seed(sizes.seed)
    return Qwen2ForCausalLM(
        Qwen2Config(
            vocab_size=len(tokenizer),
            hidden_size=sizes.hidden_size,
            intermediate_size=2 * sizes.hidden_size,
            num_hidden_layers=sizes.layers,
            num_attention_heads=sizes.heads,
            num_key_value_heads=sizes.heads,
            max_position_embeddings=128,
            tie_word_embeddings=False,
            # Weights as wide as 0.1 tell tokens apart from the start; the usual 0.02 needs many more steps.
            initializer_range=0.1,
            bos_token_id=None,
            eos_token_id=tokenizer.eos_token_id,
            pad_token_id=tokenizer.pad_token_id,
        )
    )


def warm_up(
    model: Qwen2ForCausalLM, tokenizer: PreTrainedTokenizerFast, sizes: Sizes, pool: Sequence[Question]
) -> None:
    """Supervised training in place, stopped while most answers are still wrong."""
    import torch

    optimizer = torch.optim.AdamW(model.parameters(), lr=sizes.warm_up_lr, weight_decay=0.0)
    # The schedule is that of a longer training: its end, where the learning rate falls, would teach too much.
    schedule = torch.optim.lr_scheduler.OneCycleLR(
        optimizer, max_lr=sizes.warm_up_lr, total_steps=4 * sizes.warm_up_steps, pct_start=0.1
    )
    for ids, labels in itertools.islice(_batches(tokenizer, sizes, pool), sizes.warm_up_steps):
        optimizer.zero_grad()
        model(input_ids=ids, labels=labels).loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()


def _batches(tokenizer: PreTrainedTokenizerFast, sizes: Sizes, pool: Sequence[Question]) -> Iterator[tuple[Any, Any]]:
    import torch

    rng = random.Random(sizes.seed)
    examples = []
    for question in pool:
        chat = [{"role": "user", "content": question.text}]
        prompt = tokenizer.encode(tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True))
        examples.append((prompt, tokenizer.encode(question.worked + END)))
    while True:
        batch = rng.choices(examples, k=sizes.warm_up_batch)
        width = max(len(prompt) + len(reply) for prompt, reply in batch)
        ids = torch.full((len(batch), width), tokenizer.pad_token_id)
        labels = torch.full((len(batch), width), _NO_LABEL)
        for row, (prompt, reply) in enumerate(batch):
            # Padding stands on the right of a causal model and carries no label, so it needs no attention mask.
            ids[row, : len(prompt) + len(reply)] = torch.tensor(prompt + reply)
            labels[row, len(prompt) : len(prompt) + len(reply)] = torch.tensor(reply)
        yield ids, labels
