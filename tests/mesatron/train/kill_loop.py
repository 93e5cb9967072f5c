"""Kill a training run over and over, restart it each time with the same command, and compare it with an untouched one.

    python tests/mesatron/train/kill_loop.py --kills 20 --seed 0

Kills are SIGKILL, while the run starts, between steps, within a step or while a checkpoint is being written, and hit
the whole process tree, one worker or the launcher alone. In the end the final weights, moments and curves must equal
those of the untouched run bit for bit, every checkpoint must verify or be known as unfinished, every figure must be
there exactly once, and no process, shared memory or temporary file may be left. Prints each kill and a verdict; exit
code 0 if all holds. The config's data must have been prepared (`make quickstart` does that for the default one).
"""

import argparse
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

import psutil
from tensorboard.backend.event_processing.event_file_loader import EventFileLoader

from mesatron.checkpoint.verify import list_checkpoints

SAVE_EVERY = 3
GONE_WITHIN_SECONDS = 30
MOMENTS = ("starting", "stepping", "stepping", "saving", "saving")
VICTIMS = ("tree", "tree", "worker", "launcher")


class KillLoop:
    """Two runs of one config in `folder`: `untouched` and `killed`."""

    def __init__(self, arguments: argparse.Namespace, folder: Path) -> None:
        self.draw = random.Random(arguments.seed)
        self.kills, self.processes, self.config = arguments.kills, arguments.processes, arguments.config
        self.steps = 4 * self.kills + 2 * SAVE_EVERY
        self.folder, self.temporary = folder, folder / "tmp"
        self.temporary.mkdir()
        self.start_seconds = 0.0
        self.faults: list[str] = []

    def check(self, holds: bool, fault: str) -> None:
        if not holds:
            self.faults.append(fault)

    def start(self, name: str) -> subprocess.Popen:
        overrides = {
            "name": name, "runs_folder": self.folder, "train.steps": self.steps, "train.warmup_steps": 2,
            "checkpoint.every_steps": SAVE_EVERY, "checkpoint.keep_last": 3, "evaluate.every_steps": 2 * SAVE_EVERY,
            "evaluate.max_sequences": 8, "monitor.histogram_every_steps": 2, "monitor.log_every_steps": 1,
        }  # fmt: skip
        command = [sys.executable, "-m", "mesatron", "train", str(self.config)]
        command += [f"{key}={value}" for key, value in overrides.items()] + [f"--processes={self.processes}"]
        environment = os.environ | {"OMP_NUM_THREADS": "1", "TMPDIR": str(self.temporary), "PYTHONUNBUFFERED": "1"}
        return subprocess.Popen(
            command,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            env=environment,
            start_new_session=True,
        )

    def finish(self, name: str) -> None:
        """Run to the end without a kill."""
        begin = time.monotonic()
        process = self.start(name)
        lines = []
        for line in process.stdout or []:
            if not self.start_seconds and line.startswith("step 1/"):
                self.start_seconds = time.monotonic() - begin
            lines.append(line)
        code = process.wait()
        self.check(code == 0, f"{name} ended with exit code {code}: {''.join(lines[-3:])}")

    def kill_once(self, number: int) -> None:
        moment, victim = self.draw.choice(MOMENTS), self.draw.choice(VICTIMS)
        process = self.start("killed")
        assert process.stdout is not None
        reached = "before its first step"
        try:
            if moment == "starting":
                process.wait(self.draw.uniform(0, self.start_seconds))
            else:
                steps_to_come = self.draw.randint(1, 4)
                for line in process.stdout:
                    if line.startswith("step ") and "/" in line.split()[1]:
                        reached = f"after step {line.split()[1]}"
                        steps_to_come -= 1
                    if not steps_to_come:
                        break
                if moment == "saving":
                    self.wait_for_save(process)
                process.wait(self.draw.uniform(0, 0.2 if moment == "stepping" else 0.02))
        except subprocess.TimeoutExpired:
            pass
        if process.poll() is not None:
            self.faults.append(f"kill {number} came too late: {process.stdout.read()[-300:]}")
            return
        launcher = psutil.Process(process.pid)
        tree = [launcher, *launcher.children(recursive=True)]
        # The launcher's own children; theirs only clean up after them.
        workers = launcher.children() or [launcher]
        victims = {"tree": tree, "worker": [self.draw.choice(workers)], "launcher": [launcher]}[victim]
        for one in victims:
            if one.is_running():
                os.kill(one.pid, signal.SIGKILL)
        _, alive = psutil.wait_procs(tree, timeout=GONE_WITHIN_SECONDS)
        for orphan in alive:
            self.faults.append(f"after kill {number} ({victim}) process {orphan.pid} lived on")
            orphan.kill()
        process.stdout.close()
        process.wait()
        found = Counter(info.status for info in list_checkpoints(self.folder / "killed/checkpoints", deep=True))
        self.check(not found["damaged"], f"kill {number} left a damaged checkpoint")
        print(f"kill {number:2d}  {victim:8s} {moment:8s} {reached:22s} checkpoints {dict(found)}", flush=True)

    def wait_for_save(self, process: subprocess.Popen) -> None:
        """Return when a save is under way, or when the run has ended."""
        checkpoints = self.folder / "killed/checkpoints"
        while process.poll() is None:
            if any(checkpoints.glob(".incomplete-*")):
                return

    def compare(self) -> None:
        untouched, killed = self.folder / "untouched", self.folder / "killed"
        final = f"checkpoints/step-{self.steps:08d}/manifest.json"
        checksums = [_tensor_checksums(run / final) for run in (untouched, killed)]
        self.check(checksums[0] == checksums[1], "the final weights or moments differ")
        for info in list_checkpoints(killed / "checkpoints", deep=True):
            self.check(info.status == "complete", f"{info.path} is {info.status}")
        figures = [_figures(run) for run in (untouched, killed)]
        self.check(figures[0] == figures[1], "the curves in metrics.jsonl differ")
        points = [_event_points(run) for run in (untouched, killed)]
        self.check(set(points[1].values()) == {1}, f"TensorBoard has points more than once: {points[1].most_common(3)}")
        self.check(points[0].keys() == points[1].keys(), "TensorBoard lacks points or has others")
        self.check_attempts(killed / "attempts.jsonl")
        left = list(self.temporary.iterdir())
        # torch keeps one compiler cache for each user there.
        left = [path.name for path in left if not path.name.startswith("torchinductor_")]
        self.check(not left, f"left behind: {left}")

    def check_attempts(self, path: Path) -> None:
        records = [json.loads(line) for line in path.read_text().splitlines()]
        starts = [record for record in records if record["event"] == "start"]
        ends = {record["attempt"]: record for record in records if record["event"] == "end"}
        resumed = [record["resumed_from"] or 0 for record in starts]
        self.check(
            [s["attempt"] for s in starts] == list(range(1, len(starts) + 1)), "attempts are not counted in turn"
        )
        bounds = [record for record in records if record["event"] in ("start", "end")]
        self.check(len(bounds) == 2 * len(starts) == 2 * len(ends), "an attempt has no end or two of them")
        self.check(len(starts) <= self.kills + 1, "there are more attempts than starts")
        self.check(resumed == sorted(resumed), f"an attempt went back: {resumed}")
        self.check(ends[len(starts)]["reason"] == "finished", "the last attempt did not finish")
        print(f"attempts   {Counter(end['reason'][:60] for end in ends.values())}, resumed from {resumed}")


def _tensor_checksums(manifest: Path) -> dict[str, str]:
    kinds = json.loads(manifest.read_text())["tensors"]
    return {f"{kind}/{name}": kinds[kind][name]["sha256"] for kind in ("weights", "optimizer") for name in kinds[kind]}


def _figures(run: Path) -> list[dict[str, float]]:
    """All lines of metrics.jsonl without what the clock, the memory and the storage say."""
    lines = map(json.loads, (run / "metrics.jsonl").read_text().splitlines())
    measured = ("time", "train/tokens_per_second", "memory/", "storage/")
    return [{tag: value for tag, value in line.items() if not tag.startswith(measured)} for line in lines]


def _event_points(run: Path) -> Counter[tuple[str, int]]:
    return Counter(
        (value.tag, event.step)
        for path in (run / "tensorboard").glob("*tfevents*")
        for event in EventFileLoader(str(path)).Load()
        for value in event.summary.value
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--config", type=Path, default=Path("configs/quickstart.yaml"))
    with tempfile.TemporaryDirectory(prefix="kill-loop-") as folder:
        loop = KillLoop(parser.parse_args(), Path(folder))
        loop.finish("untouched")
        for number in range(1, loop.kills + 1):
            loop.kill_once(number)
        loop.finish("killed")
        if not loop.faults:
            loop.compare()
    for fault in loop.faults:
        print(f"FAULT      {fault}")
    verdict = "FAILED" if loop.faults else "every weight, moment and figure equals the untouched run's"
    print(f"verdict    {loop.kills} kills, {loop.steps} steps, {loop.processes} processes: {verdict}")
    return 1 if loop.faults else 0


if __name__ == "__main__":
    sys.exit(main())
