"""Examples of every task against solvers that read the text a token at a time, and against what a task is by
definition: where it scores, what its tokens are, how often its noise and its queries come."""

from collections.abc import Callable, Iterator
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import Tensor

from mesatron.errors import ConfigError
from mesatron.synthetic.tasks import (
    TASKS,
    Compression,
    FuzzyRecall,
    InContextRecall,
    Memorisation,
    MultiQueryRecall,
    NoisyRecall,
    SelectiveCopying,
    Task,
)
from mesatron.synthetic.training import accuracy

IGNORED = -100
COUNT = 60


def solve_recall(task: InContextRecall, text: list[int]) -> list[int]:
    tokens = task.vocabulary_size - task.noise_tokens
    keys = tokens // 2
    known: dict[int, int] = {}
    answers = [IGNORED] * len(text)
    for place in range(0, len(text), 2):
        key = text[place]
        if key >= tokens:
            assert task.noise
            assert text[place + 1] >= tokens
            continue
        assert key < keys
        if key in known:
            answers[place] = known[key]
        if place + 1 < len(text):
            assert keys <= text[place + 1] < tokens
            assert known.setdefault(key, text[place + 1]) == text[place + 1]
    return answers


def runs(task: FuzzyRecall, text: list[int]) -> Iterator[tuple[int, tuple[int, ...], tuple[int, ...]]]:
    """Where each value of a text without filler begins, its key and itself."""
    keys = (task.vocabulary_size - 1) // 2
    place = 0
    while place < len(text):
        middle = next((i for i in range(place, len(text)) if text[i] >= keys), len(text))
        end = next((i for i in range(middle, len(text)) if text[i] < keys), len(text))
        yield middle, tuple(text[place:middle]), tuple(text[middle:end])
        place = end


def solve_fuzzy(task: FuzzyRecall, text: list[int]) -> list[int]:
    filled = sum(token == task.vocabulary_size - 1 for token in text)
    assert task.vocabulary_size - 1 not in text[filled:]
    known: dict[tuple[int, ...], tuple[int, ...]] = {}
    answers = [IGNORED] * len(text)
    for begin, key, value in runs(task, text[filled:]):
        assert len(key) == task.motif == len(set(key))
        for i, token in enumerate(known.get(key, ())):
            if filled + begin - 1 + i < len(text):
                answers[filled + begin - 1 + i] = token
        last = known.setdefault(key, value)
        assert value == last[: len(value)]  # the text may end inside it
        assert 1 <= len(last) == len(set(last)) <= task.motif
    return answers


def solve_copying(task: SelectiveCopying, text: list[int]) -> list[int]:
    blank, mark = task.vocabulary_size - 2, task.vocabulary_size - 1
    end = text.index(mark)
    copied = [token for token in text[:end] if token != blank]
    assert len(copied) == task.copied
    assert text[end + 1 :] == [blank] * task.copied
    return [IGNORED] * (end + 1) + copied


def solve_compression(task: Compression, text: list[int]) -> list[int]:
    mark = task.vocabulary_size - 1
    assert text.index(mark) == len(text) - 1
    return [*text[:-1], IGNORED]


def solve_queries(task: MultiQueryRecall, text: list[int]) -> list[int]:
    context = 2 * task.pairs
    known = dict(zip(text[:context:2], text[1:context:2], strict=True))
    assert len(known) == len(set(known.values())) == task.pairs
    assert all(0 < key < task.vocabulary_size // 2 <= value for key, value in known.items())
    queries = [token for token in text[context:] if token]
    assert sorted(queries) == sorted(known)
    assert not any(text[context + 1 :: 2])
    return [IGNORED] * context + [known.get(token, IGNORED) for token in text[context:]]


CASES: list[tuple[Task, Callable[..., list[int]]]] = [
    (InContextRecall(), solve_recall),
    (InContextRecall(vocabulary_size=7, length=6), solve_recall),
    (InContextRecall(vocabulary_size=2, length=4), solve_recall),
    (NoisyRecall(), solve_recall),
    (NoisyRecall(vocabulary_size=21, length=4, noise=0.8), solve_recall),
    (FuzzyRecall(), solve_fuzzy),
    (FuzzyRecall(vocabulary_size=7, length=12), solve_fuzzy),
    (FuzzyRecall(vocabulary_size=11, length=37, motif=2), solve_fuzzy),
    (SelectiveCopying(), solve_copying),
    (SelectiveCopying(vocabulary_size=3, length=11, copied=5), solve_copying),
    (Compression(), solve_compression),
    (Compression(vocabulary_size=5, length=7), solve_compression),
    (MultiQueryRecall(), solve_queries),
    (MultiQueryRecall(vocabulary_size=17, length=28, pairs=7), solve_queries),
]


@pytest.mark.parametrize(("task", "solve"), CASES, ids=[f"{task.name}-{task.length}" for task, _ in CASES])
def test_targets_are_the_answers_and_stand_where_they_belong(task: Task, solve: Callable[..., list[int]]) -> None:
    tokens, targets = task.generate(COUNT, 3, "test")
    assert tokens.dtype == targets.dtype == np.int64
    assert tokens.shape == targets.shape == (COUNT, task.length - isinstance(task, InContextRecall))
    assert (targets != IGNORED).any(1).all(), "every example asks something"
    assert targets.tolist() == [solve(task, text) for text in tokens.tolist()]


@pytest.mark.parametrize("task", [task for task, _ in CASES if isinstance(task, InContextRecall | FuzzyRecall)])
def test_recall_trains_on_every_next_token(task: Task) -> None:
    tokens, targets = task.generate(COUNT, 3, "train")
    filler = task.vocabulary_size - 1 if isinstance(task, FuzzyRecall) else None
    following = np.where(tokens[:, 1:] == filler, IGNORED, tokens[:, 1:])
    assert (targets[:, :-1] == following).all()
    for text, last in zip(tokens.tolist(), targets[:, -1].tolist(), strict=True):
        if isinstance(task, InContextRecall):
            assert solve_recall(task, text)[-1] == last
        else:
            assert isinstance(task, FuzzyRecall)
            *pairs, (_, asked, value) = runs(task, [token for token in [*text, last] if token != filler])
            known: dict[tuple[int, ...], tuple[int, ...]] = {}
            for _, key, answer in pairs:
                assert known.setdefault(key, answer) == answer
            assert known[asked] == value


def test_every_key_of_fuzzy_recall_is_as_likely() -> None:
    task = FuzzyRecall(vocabulary_size=7, length=200, motif=2)
    tokens, _ = task.generate(40, 0, "test")
    keys = [
        key for text in tokens.tolist() for _, key, _ in list(runs(task, [token for token in text if token != 6]))[:-1]
    ]
    for key in ((0, 1), (0, 2), (1, 0), (1, 2), (2, 0), (2, 1)):
        assert keys.count(key) / len(keys) == pytest.approx(1 / 6, abs=0.03)


def test_keys_of_fuzzy_recall_have_all_lengths_in_training() -> None:
    task = FuzzyRecall()
    tokens, _ = task.generate(COUNT, 0, "train")
    lengths = [
        (len(key), len(value))
        for text in tokens.tolist()
        for _, key, value in list(runs(task, [token for token in text if token != 15]))[:-1]
    ]
    for k in (1, 2, 3):
        for v in (1, 2, 3):
            assert lengths.count((k, v)) / len(lengths) == pytest.approx(1 / 9, abs=0.04)


def test_a_share_of_the_pairs_is_noise() -> None:
    for noise in (0.2, 0.8):
        tokens, _ = NoisyRecall(noise=noise).generate(200, 0, "test")
        # 64 pairs, of which the last and one more are never noise
        assert (tokens >= 16).mean() == pytest.approx(noise * 62 / 63.5, abs=0.02)
        assert set(np.unique(tokens)) == set(range(32))


def test_blanks_come_before_every_token_alike() -> None:
    tokens, _ = SelectiveCopying(length=100, copied=4).generate(400, 0, "train")
    blanks = [np.diff([-1, *np.flatnonzero(text[:95] != 14)]) - 1 for text in tokens]
    assert np.mean(blanks, 0) == pytest.approx([91 / 4] * 4, rel=0.1)


def test_queries_come_early_by_a_power_law() -> None:
    """The place of the only query is drawn with weights 1, 2^-0.99, 3^-0.99, ..."""
    tokens, _ = MultiQueryRecall(pairs=1, length=22).generate(4000, 0, "test")
    share = np.bincount((tokens[:, 2::2] > 0).argmax(1), minlength=10) / len(tokens)
    weight = np.arange(1, 11) ** -0.99
    assert share == pytest.approx(weight / weight.sum(), abs=0.03)


def test_memorisation_is_one_map_for_training_and_test() -> None:
    task = Memorisation()
    tokens, targets = task.generate(task.examples, 5, "train")
    assert (tokens[:, 1::2] == 255).all()
    assert (targets[:, ::2] == IGNORED).all()
    learnt = dict(zip(tokens[:, ::2].flat, targets[:, 1::2].flat, strict=True))
    assert sorted(learnt) == list(range(127))
    assert len(set(learnt.values())) == 127
    assert set(learnt.values()) <= set(range(127, 255))

    def recite(tokens: Tensor) -> Tensor:
        keys = tokens.roll(1, dims=1)
        return torch.tensor([[learnt.get(key, 0) for key in row] for row in keys.tolist()])

    assert accuracy(recite, task.generate(100, 5, "test"), 32) == 1.0
    assert accuracy(recite, task.generate(100, 6, "test"), 32) < 0.05


def test_accuracy_is_the_share_of_scored_positions() -> None:
    task = SelectiveCopying()
    examples = task.generate(70, 0, "test")

    def solve(tokens: Tensor) -> Tensor:
        return torch.tensor([solve_copying(task, text) for text in tokens.tolist()])

    def half(tokens: Tensor) -> Tensor:
        said = solve(tokens)
        said[:, -8:] = 15  # the mark, which is never to be copied
        return said

    assert accuracy(solve, examples, 32) == 1.0
    assert accuracy(half, examples, 32) == 0.5


@pytest.mark.parametrize("name", TASKS)
def test_the_seed_decides_and_training_and_test_have_nothing_in_common(name: str) -> None:
    task = TASKS[name]()
    train, again, other, test = (
        task.generate(COUNT, seed, split) for seed, split in ((0, "train"), (0, "train"), (1, "train"), (0, "test"))
    )
    assert (train.tokens == again.tokens).all()
    assert (train.targets == again.targets).all()
    texts = {row.tobytes() for row in train.tokens}
    assert len(texts) == COUNT
    for examples in (other, test):
        assert not texts & {row.tobytes() for row in examples.tokens}


def test_the_sweep_of_each_task_is_the_published_one() -> None:
    swept = {name: list(task().swept()) for name, task in TASKS.items()}
    assert [len(settings) for settings in swept.values()] == [11, 14, 11, 13, 11, 6, 4]
    for baseline, *others in swept.values():
        assert baseline == TASKS[baseline.name]()
        for task in others:
            different = {key for key, value in task.settings().items() if value != baseline.settings()[key]}
            assert len(different) == 1 + (task.name == "mqar")
            tokens, targets = replace(task, examples=2).generate(2, 0, "test")
            assert tokens.max() < task.vocabulary_size
            assert targets.max() < task.vocabulary_size


@pytest.mark.parametrize(
    ("kind", "settings", "said"),
    [
        (InContextRecall, {"length": 7}, "even"),
        (InContextRecall, {"vocabulary_size": 1}, "no key and value"),
        (NoisyRecall, {"vocabulary_size": 17}, "16 noise tokens"),
        (FuzzyRecall, {"length": 11}, "12 or more"),
        (FuzzyRecall, {"vocabulary_size": 6}, "7 or more"),
        (SelectiveCopying, {"length": 32}, "33 or more"),
        (SelectiveCopying, {"vocabulary_size": 2}, "3 or more"),
        (Compression, {"length": 1}, "2 or more"),
        (Compression, {"vocabulary_size": 2}, "3 or more"),
        (Memorisation, {"length": 5}, "even"),
        (Memorisation, {"vocabulary_size": 2}, "3 or more"),
        (MultiQueryRecall, {"length": 14}, "16 on"),
        (MultiQueryRecall, {"vocabulary_size": 9}, "10 or more"),
    ],
)
def test_settings_without_a_task_are_refused(kind: type[Task], settings: dict[str, int], said: str) -> None:
    with pytest.raises(ConfigError, match=f"^{kind.name}: .*{said}.*\\.$"):
        kind(**settings)
