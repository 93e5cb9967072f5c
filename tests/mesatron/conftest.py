"""Real trainings for the tests of training: worlds of forked processes, and a reader of what runs leave.

Importing torch and DeepSpeed takes seconds, so most worlds are forked from one server that has imported them already;
each process then runs the same entry point under the same variables as one that torchrun starts.
"""

import json
import runpy
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from multiprocessing.context import ForkServerContext
from pathlib import Path
from typing import Any

import pytest
import torch
from mesatron_data.synthetic import write_shards
from safetensors.torch import load_file
from tensorboard.backend.event_processing.event_file_loader import EventFileLoader

import mesatron
from mesatron.prove import worlds

PROGRAM = Path(mesatron.__file__).with_name("__main__.py")
FORKED = Path(__file__).with_name("forked.py")
TIME_LIMIT_SECONDS = 240
FORK = worlds.fork_server("torch.utils.tensorboard")


@dataclass(frozen=True)
class Outcome:
    """How the processes of a world ended, and the text that the first one printed."""

    exit_codes: list[int]
    output: str
    errors: str

    @property
    def exit_code(self) -> int:
        """The exit code that all processes agree on."""
        (code,) = set(self.exit_codes)
        return code

    @property
    def error_lines(self) -> list[str]:
        return self.errors.splitlines()


EXACT_TAGS = (
    "train/loss", "train/grad_norm", "train/learning_rate", "train/tokens", "data/samples_checksum",
    "solver/steps/layer_01",
)  # fmt: skip


@dataclass(frozen=True)
class RunFolder:
    """What a run left on the disk."""

    path: Path

    def lines(self) -> list[dict[str, Any]]:
        return [json.loads(line) for line in (self.path / "metrics.jsonl").read_text().splitlines()]

    def curve(self, tag: str, first: int = 1) -> list[float]:
        """The values of a tag in metrics.jsonl from step `first` on, one a step."""
        points = [(line["step"], float(line[tag])) for line in self.lines() if tag in line and line["step"] >= first]
        steps = [step for step, _ in points]
        assert steps == list(range(first, first + len(steps))), steps
        return [value for _, value in points]

    def events(self) -> list[tuple[str, int, float]]:
        """Tag, step and value (that of histograms: their count) of every point in the raw event files."""
        points = []
        for path in sorted((self.path / "tensorboard").glob("*tfevents*")):
            for event in EventFileLoader(str(path)).Load():
                for value in event.summary.value:
                    number = value.tensor.float_val[0] if value.tensor.float_val else float("nan")
                    points.append((value.tag, event.step, number))
        return points

    def attempts(self) -> list[dict[str, Any]]:
        return [json.loads(line) for line in (self.path / "attempts.jsonl").read_text().splitlines()]

    def checkpoint(self, step: int) -> Path:
        return self.path / f"checkpoints/step-{step:08d}"

    def steps(self) -> list[int]:
        return sorted(int(path.name[5:]) for path in (self.path / "checkpoints").glob("step-*"))

    def tensors(self, step: int, kind: str = "weights") -> dict[str, torch.Tensor]:
        """All tensors of a kind, read straight from the safetensors files."""
        files = sorted(self.checkpoint(step).glob(f"{kind}-*.safetensors"))
        return {name: tensor for file in files for name, tensor in load_file(file).items()}

    def checksums(self, step: int) -> dict[str, str]:
        """SHA-256 of every weight and moment, whatever file it lies in."""
        kinds = json.loads((self.checkpoint(step) / "manifest.json").read_text())["tensors"]
        return {
            f"{kind}/{name}": kinds[kind][name]["sha256"] for kind in ("weights", "optimizer") for name in kinds[kind]
        }

    def assert_equals(self, whole: "RunFolder", last_step: int) -> None:
        """Bit for bit, in final tensors and in curves; and every point is there once."""
        for tag in EXACT_TAGS:
            assert len(self.curve(tag)) == last_step
            assert self.curve(tag) == whole.curve(tag), tag
        assert self.checksums(last_step) == whole.checksums(last_step)
        points = [(tag, step) for tag, step, _ in self.events()]
        assert len(points) == len(set(points)), "a point stands twice"
        assert set(points) == {(tag, step) for tag, step, _ in whole.events()}


World = Callable[..., Outcome]


@pytest.fixture(scope="session")
def fork_server() -> ForkServerContext:
    """The server that all worlds are forked from."""
    return FORK


@pytest.fixture
def world(tmp_path: Path) -> World:
    """`world(size, script, *arguments)` runs a script as the main program of `size` processes that can talk.

    More than one get a rendezvous as torchrun's agent gives it.
    """

    def run(size: int, script: Path, *arguments: object, environment: dict[str, str] | None = None) -> Outcome:
        store = torch.distributed.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        variables = (environment or {}) | {
            "WORLD_SIZE": str(size), "LOCAL_WORLD_SIZE": str(size), "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(store.port), "TORCHELASTIC_USE_AGENT_STORE": "True",
        }  # fmt: skip
        processes = []
        for rank in range(size):
            start = {
                "variables": variables | {"RANK": str(rank), "LOCAL_RANK": str(rank)},
                "output": str(tmp_path / f"rank-{rank}"),
                "command": [str(script), *map(str, arguments)],
            }
            processes.append(FORK.Process(target=runpy.run_path, args=(str(FORKED), start), daemon=True))
        for process in processes:
            process.start()
        try:
            for process in processes:
                process.join(TIME_LIMIT_SECONDS)
                assert process.exitcode is not None, f"{script} hangs"
        finally:
            for process in processes:
                process.kill()
        texts = [Path(f"{tmp_path}/rank-0.{stream}").read_text() for stream in ("stdout", "stderr")]
        return Outcome([process.exitcode for process in processes], *texts)

    return run


@pytest.fixture
def train(world: World) -> World:
    """`train(size, config, *options)`: the train verb in forked processes."""
    return lambda size, *arguments, **settings: world(size, PROGRAM, "train", *arguments, **settings)


@pytest.fixture(scope="session")
def wide_data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Shards with the vocabulary of GPT-2 (50257) and sequences of 11 tokens."""
    return write_shards(tmp_path_factory.mktemp("wide") / "shards", 50257, 11, {"train": 300, "validation": 5}, seed=3)


@pytest.fixture(scope="session")
def short_data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Shards of 43 training sequences of 19 tokens, vocabulary 101: with a global batch of 8, 5 steps an epoch."""
    return write_shards(tmp_path_factory.mktemp("short") / "shards", 101, 19, {"train": 43, "validation": 7}, seed=4)


@pytest.fixture(scope="session")
def odd_config(tiny_config: Callable[..., Path]) -> Callable[..., Path]:
    """`odd_config(folder, shards, **overrides)`: a config for `shards` whose model divides by nothing."""

    def write(folder: Path, shards: Path, **overrides: Any) -> Path:
        manifest = json.loads((shards / "manifest.json").read_text())
        odd = {
            "model.vocabulary_size": manifest["vocabulary_size"], "model.width": 27, "model.heads": 3,
            "model.head_dim": 9, "model.mlp_ratio": 1.9, "model.mesa.chunk_size": 7,
            # Outputs of a head near zero would be divided by themselves, which turns 1e-7 of rounding into 1e-3.
            "model.norm_epsilon": 1e-2,
            "tokenizer.path": str(folder / "none"), "data.folder": str(shards),
            "data.context_length": manifest["context_length"], "evaluate.every_steps": 1000,
            "checkpoint.every_steps": 1000, "monitor.histogram_every_steps": 1000,
        }  # fmt: skip
        return tiny_config(folder, **odd | overrides)

    return write


def largest_difference(ours: Sequence[float], theirs: Sequence[float]) -> float:
    """The largest relative difference of two curves."""
    assert len(ours) == len(theirs)
    return max(abs(a - b) / abs(b) for a, b in zip(ours, theirs, strict=True))


@pytest.fixture(scope="session")
def difference() -> Callable[[Sequence[float], Sequence[float]], float]:
    return largest_difference


@pytest.fixture(scope="session")
def run_of() -> Callable[[Path], RunFolder]:
    """The run folder that a config of `tiny_config` or `odd_config` trains in."""
    return lambda config: RunFolder(config.parent / "runs/tiny")
