"""A training that runs as a job of the test cluster: submitted, watched, harmed, and looked at when it is over."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import psutil
from slurm_cluster import Cluster
from tensorboard.backend.event_processing.event_file_loader import EventFileLoader

import mesatron
from mesatron.checkpoint.verify import list_checkpoints
from mesatron.config import load_config

ROOT = Path(mesatron.__file__).parents[1]
SCRIPT = ROOT / "launchers/slurm/train.sbatch"


def environment(temporary: Path) -> dict[str, str]:
    """Variables with which the cluster's hosts find this source tree and this Python."""
    temporary.mkdir(exist_ok=True)
    return os.environ | {
        "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
        "PYTHONPATH": ":".join(str(ROOT / folder) for folder in (".", "kernels", "data_pipeline")),
        "OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1", "TMPDIR": str(temporary),
    }  # fmt: skip


class Training:
    """The run of a config, as jobs of `cluster`."""

    def __init__(self, cluster: Cluster, config: Path, temporary: Path) -> None:
        self.cluster, self.config, self.temporary = cluster, config, temporary
        loaded = load_config(config)
        self.folder, self.steps = loaded.run_folder, loaded.train.steps
        self.output = config.parent / "job.out"
        self.job = ""
        self.damaged = False
        """Whether a checkpoint was damaged on purpose, which is to be found set aside, or removed since."""

    def submit(self, *options: str, overrides: tuple[str, ...] = (), variables: dict[str, str] | None = None) -> str:
        command = ["--nodes=2", f"--output={self.output}", *options, str(SCRIPT), str(self.config), *overrides]
        self.job = self.cluster.submit(*command, env=environment(self.temporary) | (variables or {}))
        return self.job

    def beside(self, folder: str) -> Training:
        """Another run of the same config, in `folder`."""
        other = Training(self.cluster, self.config, self.temporary)
        other.folder = Path(folder)
        return other

    def verb(self, *arguments: str, check: bool = True, seconds: float = 60) -> subprocess.CompletedProcess[str]:
        """A verb of `mesatron`, as a person calls it on the cluster's head."""
        command = [sys.executable, "-m", "mesatron", *arguments]
        return self.cluster.on(
            "head", *command, env=environment(self.temporary), cwd=self.config.parent, check=check, timeout=seconds
        )

    def launch(self, *options: str) -> None:
        """Submit by `mesatron launch slurm`."""
        done = self.verb("launch", "slurm", str(self.config), "--nodes=2", *options)
        self.take_job(done.stdout)

    def take_job(self, answer: str) -> None:
        """Follow the job that a verb of `mesatron launch` has submitted."""
        self.job = answer.split()[1]
        self.output = self.folder / f"launch/slurm-{self.job}.out"

    def text(self) -> str:
        """All that the job has printed, over all its starts."""
        return self.output.read_text() if self.output.exists() else ""

    def step(self) -> int:
        """The step that was printed last."""
        steps = re.findall(rf"step (\d+)/{self.steps}", self.text())
        return int(steps[-1]) if steps else 0

    def starts(self) -> int:
        """How many attempts have begun to train."""
        return len(re.findall(r"^run  ", self.text(), re.MULTILINE))

    def wait_for_step(self, step: int, start: int = 1, seconds: float = 120) -> None:
        """Return when the run's `start`-th start has reached a step."""

        def reached() -> bool:
            assert self.cluster.job(self.job)["JobState"] not in ("FAILED", "COMPLETED"), self.text()
            return self.starts() >= start and self.step() >= step

        self.cluster.wait_for(reached, seconds, f"step {step} of start {start}: {self.text()}")

    def workers(self, node: str) -> list[psutil.Process]:
        """The training processes on a node."""
        return [one for one in self.cluster.processes(node) if "RANK" in _environment_of(one)]

    @contextmanager
    def paused(self) -> Iterator[list[psutil.Process]]:
        """Its training processes stand still meanwhile, lest it ends before it can be asked or told something."""
        workers = [worker for node in self.cluster.nodes for worker in self.workers(node)]
        for worker in workers:
            worker.suspend()
        try:
            yield workers
        finally:
            for worker in workers:
                with suppress(psutil.NoSuchProcess):
                    worker.resume()

    def agent(self, node: str) -> psutil.Process:
        """The torchrun on a node."""
        return psutil.Process(self.workers(node)[0].ppid())

    def finish(self, code: int = 0, seconds: float = 180) -> None:
        """Wait for the job to end with an exit code, and look at what it left."""
        job = self.cluster.wait_for_state(self.job, seconds=seconds)
        assert job["ExitCode"] == f"{code}:0", f"{job['JobState']} {job['ExitCode']}: {self.text()}"
        self.check_nothing_left()

    # --- what a run leaves

    def records(self, event: str) -> list[dict[str, Any]]:
        path = self.folder / "attempts.jsonl"
        lines = map(json.loads, path.read_text().splitlines() if path.exists() else [])
        return [record for record in lines if record["event"] == event]

    def decisions(self) -> list[str]:
        return [record["what"] for record in self.records("decision")]

    def checksums(self) -> dict[str, str]:
        """SHA-256 of every weight and moment of the last step."""
        manifest = self.folder / f"checkpoints/step-{self.steps:08d}/manifest.json"
        kinds = json.loads(manifest.read_text())["tensors"]
        return {f"{kind}/{name}": x["sha256"] for kind in ("weights", "optimizer") for name, x in kinds[kind].items()}

    def points(self) -> Counter[tuple[str, int]]:
        """How often each tag and step stands in TensorBoard's files."""
        return Counter(
            (value.tag, event.step)
            for path in (self.folder / "tensorboard").glob("*tfevents*")
            for event in EventFileLoader(str(path)).Load()
            for value in event.summary.value
        )

    def check_equals(self, untouched: Training) -> None:
        """The same weights bit for bit, and every point once, as in a run that nothing happened to."""
        assert self.checksums() == untouched.checksums()
        points = self.points()
        assert set(points.values()) == {1}, points.most_common(3)
        steps = [step for tag, step in points if tag == "train/loss"]
        assert sorted(steps) == list(range(1, self.steps + 1))
        for info in list_checkpoints(self.folder / "checkpoints", deep=True):
            assert info.status == "complete" or (self.damaged and info.path.name.startswith("damaged-")), info

    def check_no_process(self) -> None:
        """Nothing runs on any host, or does not for long: an srun that was cut off from its job lives for a minute."""
        for host in self.cluster.nodes:
            try:
                self.cluster.wait_for(lambda host=host: not self.cluster.processes(host), 180, f"{host} to be empty")
            except TimeoutError as error:
                left = "; ".join(" ".join(process.cmdline()) for process in self.cluster.processes(host))
                raise TimeoutError(f"{error}: {left}") from None

    def check_nothing_left(self) -> None:
        """No process on any host, shared memory, temporary file or note of the job's start."""
        self.check_no_process()
        for host in self.cluster.nodes:
            assert self.cluster.on(host, "ls", "/dev/shm").stdout == "", host
        # torch keeps one compiler cache for each user there.
        assert [path.name for path in self.temporary.iterdir() if not path.name.startswith("torchinductor_")] == []
        assert list((self.folder / "launch").glob("words-*")) == []
        assert not (self.folder / "stop-request.json").exists()


def _environment_of(process: psutil.Process) -> dict[str, str]:
    try:
        return process.environ()
    except psutil.Error:
        return {}
