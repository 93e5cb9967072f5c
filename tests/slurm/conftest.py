"""A Slurm cluster for the tests that need one, trainings on it, and what must hold of each once it is over."""

import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parent))

from slurm_cluster import Cluster, unavailable
from slurm_training import Training

STEPS = 60


@contextmanager
def start_cluster(name: str, **options: Any) -> Iterator[Cluster]:
    """A cluster with the `options` of Cluster; the test is skipped where none can be started."""
    missing = unavailable()
    if missing:
        pytest.skip(f"no Slurm here: {missing}")
    with tempfile.TemporaryDirectory(prefix="mesatron-slurm-") as folder, ExitStack() as stack:
        try:
            cluster = stack.enter_context(Cluster(Path(folder) / name, **options))
        except (OSError, RuntimeError, TimeoutError, subprocess.SubprocessError) as error:
            pytest.skip(f"Slurm does not start here: {error}")
        yield cluster


@pytest.fixture(scope="session")
def cluster() -> Iterator[Cluster]:
    """Three nodes, shared by all tests; each leaves it idle."""
    with start_cluster("c", nodes=3, kill_wait_seconds=10) as cluster:
        yield cluster


Make = Callable[..., Training]


def maker(cluster: Cluster, folder: Path, tiny_config: Callable[..., Path]) -> Make:
    def make(name: str = "run", **overrides: Any) -> Training:
        quick = {
            "model.layers": 1, "train.steps": STEPS, "checkpoint.every_steps": 5, "evaluate.every_steps": STEPS,
            "evaluate.max_sequences": 8, "monitor.histogram_every_steps": 10, "launch.preflight_seconds": 0,
        }  # fmt: skip
        return Training(cluster, tiny_config(folder / name, **quick | overrides), folder / "temporary")

    return make


@pytest.fixture
def training(cluster: Cluster, tmp_path: Path, tiny_config: Callable[..., Path]) -> Iterator[Make]:
    """`training(name, **overrides)`: a run of 60 steps, its checkpoints 5 steps apart, that is not submitted yet."""
    yield maker(cluster, tmp_path, tiny_config)
    cluster.slurm("scancel", "--user=root")
    cluster.wait_for(lambda: cluster.idle() == cluster.nodes, 60, "all nodes to be idle")


@pytest.fixture
def alone(tmp_path: Path, tiny_config: Callable[..., Path]) -> Iterator[Make]:
    """`alone(**settings)`: that run, on a cluster of its own that has one node and these lines of slurm.conf."""
    with ExitStack() as stack:

        def make(**settings: str) -> Training:
            cluster = stack.enter_context(start_cluster("one", nodes=1, settings=settings))
            return maker(cluster, tmp_path, tiny_config)()

        yield make


@pytest.fixture(scope="session")
def untouched(cluster: Cluster, tmp_path_factory: pytest.TempPathFactory, tiny_config: Callable) -> Training:
    """That run on two nodes, finished, after nothing happened to it."""
    training = maker(cluster, tmp_path_factory.mktemp("untouched"), tiny_config)()
    training.submit()
    training.finish()
    return training
