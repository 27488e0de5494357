"""The task and the model of this recipe: sums from reasoning-gym, and a model of 0.15 million parameters.

A pretrained model would need a download and be too slow for a laptop. So this builds one, and a few seconds of
supervised warm-up replace its pre-training: first mostly on worked answers, which teach the arithmetic, then mostly on
guesses. After that the model can work a sum out but usually guesses. Reinforcement learning must find out from the
judges' scores that working pays. Warm-up, training and validation share no question.
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
# A number is one token with its sign and the space before it, so the model learns sums of numbers, not of digits.
_PIECES = r" ?-?\d+| ?[A-Za-z]+| ?[^\sA-Za-z\d]|\s+"
_NO_LABEL = -100


@dataclass(frozen=True)
class Sizes:
    """Sizes of the data sets, the model and its warm-up; `seed` fixes the questions, the examples and the weights."""

    seed: int = 0
    val_questions: int = 32
    train_questions: int = 512
    warm_up_questions: int = 1_500
    terms: int = 3
    """Numbers in one sum, each from 0 to 9."""
    hidden_size: int = 64
    layers: int = 2
    heads: int = 4
    warm_up_batch: int = 32
    warm_up_lr: float = 8e-3
    learning_steps: int = 420
    """Warm-up steps that teach the arithmetic."""
    learning_worked: float = 0.85
    """Share of worked answers in these steps. Some guesses are included, because their sudden start would disturb the
    network."""
    habit_steps: int = 80
    """Later warm-up steps that teach guessing."""
    habit_worked: float = 0.25
    """Share of worked answers in those steps."""


@dataclass(frozen=True)
class Question:
    """One task: its text, the sum in it, and the right answer."""

    text: str
    expression: str
    answer: int

    @property
    def worked(self) -> str:
        """A worked answer: one equation for each operation, then the result."""
        first, *rest = self.expression.split()
        total, steps = int(first), []
        for operator, operand in zip(rest[::2], rest[1::2], strict=True):
            before = total
            total += int(operand) if operator == "+" else -int(operand)
            steps.append(f"{before} {operator} {operand} = {total}")
        return f"{', '.join(steps)}. The answer is {total}."

    def guessed(self, rng: random.Random) -> str:
        """A guessed answer: only a number, at most 9 off."""
        return f"The answer is {self.answer + rng.randint(-9, 9)}."


@dataclass(frozen=True)
class Assets:
    """The paths of a prepared recipe's files."""

    train: Path
    val: Path
    model: Path
    tokenizer: Path


def questions(sizes: Sizes) -> list[Question]:
    """Different sums for all three sets, in an order fixed by the seed.

    Raises ValueError if reasoning-gym has too few of this length.
    """
    import reasoning_gym

    count = sizes.val_questions + sizes.train_questions + sizes.warm_up_questions
    terms = {"min_terms": sizes.terms, "max_terms": sizes.terms}
    data = reasoning_gym.create_dataset(
        "chain_sum", size=4 * count, seed=sizes.seed, min_digits=1, max_digits=1, **terms
    )
    found: dict[str, Question] = {}
    for index in range(4 * count):
        item = data[index]
        text = str(item["question"])
        found[text] = Question(text, str(item["metadata"]["expression"]), int(item["answer"]))
        if len(found) == count:
            return list(found.values())
    raise ValueError(f"found {len(found)} different sums of {sizes.terms} terms, not {count}: ask for fewer")


def prepare(folder: Path, sizes: Sizes = Sizes()) -> Assets:
    """Write the data sets (parquet, verl's columns), the tokenizer and the warmed-up model to `folder`."""
    import pandas
    import torch
    from transformers.utils import logging

    torch.set_num_threads(1)
    assets = Assets(folder / "train.parquet", folder / "val.parquet", folder / "model", folder / "tokenizer")
    folder.mkdir(parents=True, exist_ok=True)
    drawn = iter(questions(sizes))
    val = list(itertools.islice(drawn, sizes.val_questions))
    train = list(itertools.islice(drawn, sizes.train_questions))
    rest = list(drawn)
    pandas.DataFrame(rows(train, "train")).to_parquet(assets.train)
    pandas.DataFrame(rows(val, "val")).to_parquet(assets.val)
    rng = random.Random(sizes.seed)
    tokenizer = build_tokenizer([f"{question.text}\n{question.worked} {question.guessed(rng)}" for question in rest])
    model = build_model(sizes, tokenizer)
    warm_up(model, tokenizer, sizes, rest)
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
        vocab_size=1_000,
        special_tokens=[PAD, START, END],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    # Every number that an equation or a guess can contain, even if the texts do not.
    numbers = [f"{number} {number}" for number in range(-45, 46)]
    tokenizer.train_from_iterator([*texts, *numbers, "system user assistant"], trainer)
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
            # Wide enough to distinguish tokens from the first step; with the usual 0.02 learning starts later.
            initializer_range=0.05,
            bos_token_id=None,
            eos_token_id=tokenizer.eos_token_id,
            pad_token_id=tokenizer.pad_token_id,
        )
    )


def warm_up(
    model: Qwen2ForCausalLM, tokenizer: PreTrainedTokenizerFast, sizes: Sizes, pool: Sequence[Question]
) -> None:
    """Supervised training in place, on the answers only."""
    import torch

    rng = random.Random(sizes.seed)
    learning = _batches(tokenizer, sizes, pool, sizes.learning_worked, rng)
    habit = _batches(tokenizer, sizes, pool, sizes.habit_worked, rng)
    steps = sizes.learning_steps + sizes.habit_steps
    optimizer = torch.optim.AdamW(model.parameters(), lr=sizes.warm_up_lr, betas=(0.9, 0.98), weight_decay=0.0)
    # One falling schedule over both parts: guessing is learned at a low rate, which preserves the arithmetic.
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, sizes.warm_up_lr, total_steps=steps, pct_start=0.1)
    for step in range(steps):
        ids, labels = next(learning if step < sizes.learning_steps else habit)
        optimizer.zero_grad()
        model(input_ids=ids, labels=labels).loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()


def _batches(
    tokenizer: PreTrainedTokenizerFast, sizes: Sizes, pool: Sequence[Question], worked: float, rng: random.Random
) -> Iterator[tuple[Any, Any]]:
    import torch

    chats = [[{"role": "user", "content": question.text}] for question in pool]
    texts = [str(tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True)) for chat in chats]
    prompts: list[list[int]] = tokenizer(texts)["input_ids"]
    while True:
        picked = rng.choices(range(len(pool)), k=sizes.warm_up_batch)
        answers = [pool[i].worked if rng.random() < worked else pool[i].guessed(rng) for i in picked]
        replies = tokenizer([answer + END for answer in answers])["input_ids"]
        batch = [(prompts[i], reply) for i, reply in zip(picked, replies, strict=True)]
        width = max(len(prompt) + len(reply) for prompt, reply in batch)
        ids = torch.full((len(batch), width), tokenizer.pad_token_id)
        labels = torch.full((len(batch), width), _NO_LABEL)
        for row, (prompt, reply) in enumerate(batch):
            # Padding is on the right of a causal model and has no label, so it needs no attention mask.
            ids[row, : len(prompt) + len(reply)] = torch.tensor(prompt + reply)
            labels[row, len(prompt) : len(prompt) + len(reply)] = torch.tensor(reply)
        yield ids, labels
