"""The tasks: their settings, and examples of them made from a seed.

The settings are those of MAD's published suite and, for MQAR, of Zoology (arXiv 2312.04927, figure 2): a task without
arguments is the baseline, and its `changes` are what a sweep does to that.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass, fields, replace
from typing import Any, ClassVar, Literal, NamedTuple

import numpy as np
from mesatron_data.batch import IGNORED_TARGET

from mesatron.errors import ConfigError

Split = Literal["train", "test"]
Array = np.ndarray

FEWER_EXAMPLES = (6400, 3200, 1600, 800)


def each(**values: tuple[Any, ...]) -> tuple[dict[str, Any], ...]:
    """Changes of one field at a time."""
    return tuple({field: value} for field, choices in values.items() for value in choices)


class Examples(NamedTuple):
    """Tokens int64 [N, T] and, of the same shape, what is to be said at each of them: -100 where nothing is scored."""

    tokens: Array
    targets: Array


@dataclass(frozen=True, kw_only=True)
class Task(ABC):
    """One task in one setting. Raises ConfigError for values that leave no such task."""

    name: ClassVar[str]
    epochs: ClassVar[int] = 200
    test_examples: ClassVar[int] = 1280
    auto_encoder: ClassVar[bool] = False
    changes: ClassVar[tuple[dict[str, Any], ...]]

    vocabulary_size: int
    length: int
    examples: int = 12_800

    def __post_init__(self) -> None:
        for problem in self._problems():
            raise ConfigError(f"{self.name}: {problem}")

    def generate(self, count: int, seed: int, split: Split) -> Examples:
        """`count` examples, the same ones for the same seed and split; those of the two splits are drawn apart."""
        return self._examples(count, np.random.default_rng([seed, ("train", "test").index(split)]), seed, split)

    def settings(self) -> dict[str, Any]:
        """Every field by name."""
        return {field.name: getattr(self, field.name) for field in fields(self)}

    def swept(self) -> Iterator[Task]:
        """This setting, then its changes."""
        yield self
        for change in self.changes:
            yield replace(self, **change)

    @abstractmethod
    def _problems(self) -> Iterator[str]:
        """What is wrong with the settings."""

    @abstractmethod
    def _examples(self, count: int, draw: np.random.Generator, seed: int, split: Split) -> Examples: ...


@dataclass(frozen=True, kw_only=True)
class InContextRecall(Task):
    """Pairs of a key and a value, a new map from keys to values in every example: say the value of a key shown before.

    The first half of the vocabulary are keys, the second values, and the last pair's key has been shown before. A
    sequence of `length` tokens gives `length` - 1 of them to read. As in MAD, training predicts every next token and
    the test scores the answers alone. Each pair is one of `noise_tokens`, the last of the vocabulary, with probability
    `noise`.
    """

    name = "in-context-recall"
    changes = each(vocabulary_size=(32, 64, 128), length=(256, 512, 1024), examples=FEWER_EXAMPLES)

    vocabulary_size: int = 16
    length: int = 128
    noise_tokens: int = 0
    noise: float = 0.0

    def _problems(self) -> Iterator[str]:
        if self.vocabulary_size - self.noise_tokens < 2:
            yield (
                f"a vocabulary of {self.vocabulary_size} with {self.noise_tokens} noise tokens has no key and value; "
                "make it larger."
            )
        if self.length % 2 or self.length < 4:
            yield f"a length of {self.length} is not that of two pairs or more; take an even one from 4 on."

    def _examples(self, count: int, draw: np.random.Generator, seed: int, split: Split) -> Examples:
        pairs, tokens = self.length // 2, self.vocabulary_size - self.noise_tokens
        keys, row = tokens // 2, np.arange(count)
        noise = draw.random((count, pairs)) < self.noise
        noise[row, draw.integers(pairs - 1, size=count)] = False  # a key for the last pair to ask for
        noise[:, -1] = False
        value_of = draw.integers(keys, tokens, (count, keys))
        key = draw.integers(keys, size=(count, pairs))
        answered = np.zeros((count, pairs), bool)
        shown = np.zeros((count, keys), bool)
        for place in range(pairs):
            if place == pairs - 1:
                key[:, place] = (draw.random(shown.shape) * shown).argmax(1)
            real = row[~noise[:, place]]
            answered[real, place] = shown[real, key[real, place]]
            shown[real, key[real, place]] = True
        text = np.stack([key, np.take_along_axis(value_of, key, 1)], -1)
        answers = np.full_like(text, IGNORED_TARGET)
        answers[answered, 1] = text[answered, 1]
        if self.noise:
            text[noise] = draw.integers(tokens, self.vocabulary_size, (int(noise.sum()), 2))
        text, answers = text.reshape(count, -1), answers.reshape(count, -1)
        return Examples(text[:, :-1], (text if split == "train" else answers)[:, 1:])


@dataclass(frozen=True, kw_only=True)
class NoisyRecall(InContextRecall):
    """In-context recall with noise."""

    name = "noisy-recall"
    changes = each(
        vocabulary_size=(48, 80, 144), length=(256, 512, 1024), examples=FEWER_EXAMPLES, noise=(0.4, 0.6, 0.8)
    )

    vocabulary_size: int = 32
    noise_tokens: int = 16
    noise: float = 0.2


@dataclass(frozen=True, kw_only=True)
class FuzzyRecall(Task):
    """In-context recall whose keys and values are 1 to `motif` different tokens each; `length` tokens to read.

    Keys of the test always have `motif` tokens, and every token of an answer is scored. The last of the vocabulary
    fills the front of a sequence, and is never scored.
    """

    name = "fuzzy-recall"
    changes = each(vocabulary_size=(32, 64, 128), length=(256, 512, 1024), examples=FEWER_EXAMPLES)

    vocabulary_size: int = 16
    length: int = 128
    motif: int = 3

    def _problems(self) -> Iterator[str]:
        least = 2 * self.motif + 1
        if self.vocabulary_size < least:
            yield (
                f"a vocabulary of {self.vocabulary_size} is too small for keys and values of {self.motif} tokens; take "
                f"{least} or more."
            )
        if self.length < 4 * self.motif:
            yield (
                f"a length of {self.length} has no room for two pairs of {2 * self.motif} tokens; take "
                f"{4 * self.motif} or more."
            )

    def _examples(self, count: int, draw: np.random.Generator, seed: int, split: Split) -> Examples:
        filler = self.vocabulary_size - 1
        text = np.full((count, self.length + 1), filler)
        answers = np.full_like(text, IGNORED_TARGET)
        for row in range(count):
            tokens, answer = self._sequence(draw, 1 if split == "train" else self.motif)
            text[row, -len(tokens) :] = tokens
            answers[row, -len(tokens) :] = answer
        following = np.where(text == filler, IGNORED_TARGET, text)
        return Examples(text[:, :-1], (following if split == "train" else answers)[:, 1:])

    def _sequence(self, draw: np.random.Generator, smallest_key: int) -> tuple[list[int], list[int]]:
        """Pairs as long as two more would fit, and a last one that asks for a key shown before."""
        most = self.length // 2
        half = (self.vocabulary_size - 1) // 2
        keys = _motifs(draw, most, range(half), smallest_key, self.motif)
        values = _motifs(draw, most, range(half, self.vocabulary_size - 1), 1, self.motif)
        value_of: dict[tuple[int, ...], tuple[int, ...]] = {}
        tokens: list[int] = []
        answers: list[int] = []

        def add(key: tuple[int, ...], value: tuple[int, ...]) -> None:
            shown = key in value_of
            value = value_of.setdefault(key, value)
            tokens.extend(key + value)
            answers.extend([IGNORED_TARGET] * len(key))
            answers.extend(value if shown else [IGNORED_TARGET] * len(value))

        for key, value in zip(keys, values, strict=True):
            if len(tokens) + 4 * self.motif > self.length + 1:
                break
            add(key, value)
        asked = list(value_of)[draw.integers(len(value_of))]
        add(asked, value_of[asked])
        return tokens, answers


def _motifs(
    draw: np.random.Generator, count: int, vocabulary: range, smallest: int, largest: int
) -> list[tuple[int, ...]]:
    """`count` tuples of `smallest` to `largest` different tokens each."""
    motifs = draw.random((count, len(vocabulary))).argsort(1)[:, :largest] + vocabulary.start
    sizes = draw.integers(smallest, largest + 1, count)
    return [tuple(motif[:size]) for motif, size in zip(motifs.tolist(), sizes.tolist(), strict=True)]


@dataclass(frozen=True, kw_only=True)
class SelectiveCopying(Task):
    """`copied` tokens among blanks, then a mark and as many blanks, at which to say the tokens in their order.

    Every blank of the first part comes before one of the tokens, each of them as likely. The last two of the vocabulary
    are the blank and the mark.
    """

    name = "selective-copying"
    changes = each(vocabulary_size=(32, 64, 128), length=(512, 1024), examples=FEWER_EXAMPLES, copied=(32, 64, 96))

    vocabulary_size: int = 16
    length: int = 256
    copied: int = 16

    def _problems(self) -> Iterator[str]:
        if self.vocabulary_size < 3:
            yield f"a vocabulary of {self.vocabulary_size} has no token to copy; take 3 or more."
        if self.length < 2 * self.copied + 1:
            yield (
                f"a length of {self.length} has no room for {self.copied} tokens twice and a mark; take "
                f"{2 * self.copied + 1} or more."
            )

    def _examples(self, count: int, draw: np.random.Generator, seed: int, split: Split) -> Examples:
        blank, mark = self.vocabulary_size - 2, self.vocabulary_size - 1
        copied = draw.integers(blank, size=(count, self.copied))
        blanks = self.length - 2 * self.copied - 1
        before = draw.multinomial(blanks, np.full(self.copied, 1 / self.copied), size=count).cumsum(1)
        text = np.full((count, self.length), blank)
        np.put_along_axis(text, before + np.arange(self.copied), copied, 1)
        text[:, blanks + self.copied] = mark
        targets = np.full_like(text, IGNORED_TARGET)
        targets[:, -self.copied :] = copied
        return Examples(text, targets)


@dataclass(frozen=True, kw_only=True)
class Compression(Task):
    """Random tokens and a mark, the last of the vocabulary: an auto-encoder says them from its state at the mark."""

    name = "compression"
    auto_encoder = True
    changes = each(vocabulary_size=(32, 64, 128), length=(64, 128, 256), examples=FEWER_EXAMPLES)

    vocabulary_size: int = 16
    length: int = 32

    def _problems(self) -> Iterator[str]:
        if self.vocabulary_size < 3:
            yield f"a vocabulary of {self.vocabulary_size} leaves nothing to tell apart; take 3 or more."
        if self.length < 2:
            yield f"a length of {self.length} has no token beside the mark; take 2 or more."

    def _examples(self, count: int, draw: np.random.Generator, seed: int, split: Split) -> Examples:
        text = draw.integers(self.vocabulary_size - 1, size=(count, self.length))
        text[:, -1] = self.vocabulary_size - 1
        targets = text.copy()
        targets[:, -1] = IGNORED_TARGET
        return Examples(text, targets)


@dataclass(frozen=True, kw_only=True)
class Memorisation(Task):
    """Keys, each before a mark at which to say its value, by one map for all examples of a seed, training and test.

    The first half of the vocabulary without the mark, its last token, are keys; no two have one value.
    """

    name = "memorisation"
    changes = each(vocabulary_size=(512, 1024, 2048, 4096, 8192))

    vocabulary_size: int = 256
    length: int = 32
    examples: int = 256

    def _problems(self) -> Iterator[str]:
        if self.vocabulary_size < 3:
            yield f"a vocabulary of {self.vocabulary_size} has no key, value and mark; take 3 or more."
        if self.length % 2:
            yield f"a length of {self.length} is not that of pairs; take an even one."

    def values(self, seed: int) -> Array:
        """The value of every key, int64 [keys]."""
        keys = (self.vocabulary_size - 1) // 2
        return np.random.default_rng([seed, 2]).permutation(np.arange(keys, self.vocabulary_size - 1))[:keys]

    def _examples(self, count: int, draw: np.random.Generator, seed: int, split: Split) -> Examples:
        values = self.values(seed)
        key = draw.integers(len(values), size=(count, self.length // 2))
        text = np.stack([key, np.full_like(key, self.vocabulary_size - 1)], -1)
        targets = np.stack([np.full_like(key, IGNORED_TARGET), values[key]], -1)
        return Examples(text.reshape(count, -1), targets.reshape(count, -1))


@dataclass(frozen=True, kw_only=True)
class MultiQueryRecall(Task):
    """MQAR: `pairs` of different keys and different values, then every key once more, at which to say its value.

    Queries stand at even places of the rest, more likely near its start (a power law, as repeated words have), and
    token 0 everywhere else. Only queries are scored, in training too. The second half of the vocabulary are values.
    """

    name = "mqar"
    epochs = 64
    test_examples = 3000
    changes = ({"pairs": 8, "length": 128}, {"pairs": 16, "length": 256}, {"pairs": 64, "length": 512})
    power: ClassVar[float] = 0.01

    vocabulary_size: int = 8192
    length: int = 64
    pairs: int = 4
    examples: int = 100_000

    def _problems(self) -> Iterator[str]:
        if self.length % 2 or self.length < 4 * self.pairs:
            yield (
                f"a length of {self.length} has no room for {self.pairs} pairs and as many queries; take an even one "
                f"from {4 * self.pairs} on."
            )
        if self.vocabulary_size // 2 - 1 < self.pairs:
            yield (
                f"a vocabulary of {self.vocabulary_size} has no {self.pairs} keys; take {2 * self.pairs + 2} or more."
            )

    def _examples(self, count: int, draw: np.random.Generator, seed: int, split: Split) -> Examples:
        half = self.vocabulary_size // 2
        key = _different(draw, count, half - 1, self.pairs) + 1
        value = _different(draw, count, self.vocabulary_size - half, self.pairs) + half
        text = np.zeros((count, self.length), np.int64)
        text[:, : 2 * self.pairs] = np.stack([key, value], -1).reshape(count, -1)
        places = self.length // 2 - self.pairs
        # The largest of logarithms plus Gumbel noise are draws without replacement.
        weight = (self.power - 1) * np.log(np.arange(1, places + 1)) + draw.gumbel(size=(count, places))
        place = 2 * (self.pairs + (-weight).argsort(1)[:, : self.pairs])
        np.put_along_axis(text, place, key, 1)
        targets = np.full_like(text, IGNORED_TARGET)
        np.put_along_axis(targets, place, value, 1)
        return Examples(text, targets)


def _different(draw: np.random.Generator, count: int, size: int, chosen: int) -> Array:
    """int64 [count, chosen]: in every row different numbers below `size`."""
    return np.stack([draw.choice(size, chosen, replace=False) for _ in range(count)])


TASKS: dict[str, type[Task]] = {
    task.name: task
    for task in (
        InContextRecall, NoisyRecall, FuzzyRecall, SelectiveCopying, Compression, Memorisation, MultiQueryRecall,
    )
}  # fmt: skip
