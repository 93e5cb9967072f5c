"""What a Slurm job does before and after its training: where the processes meet, and whether to start again."""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from mesatron.cluster import scheduler
from mesatron.cluster.history import History
from mesatron.cluster.network import endpoint, free_port, source_address
from mesatron.cluster.request import FOR_CLUSTER, FOR_USER, asked_by_user, withdraw
from mesatron.cluster.words import LastWords, forget
from mesatron.config import Config, accumulation_steps, data_parallel_size
from mesatron.errors import ConfigError, FencedError, PeerLostError, StoppedEarly, StorageError, UnfitError, say
from mesatron.files import replace_file

LAUNCH_FOLDER = "launch"
"""Below a run folder: what was submitted, and notes about the job that runs."""
JOB_FILE, UNFIT_FILE = "job.json", "unfit.json"
WORDS = "words-"
LOST_PEER, KILLED = PeerLostError.exit_code, 1
FINAL_CODES = {0, 2, 3, 4, 5, 6, 7, 75, 78}
"""Exit codes of a training that another start would not change, or that has been replaced by another."""
FAILURES_OF_A_NODE = 2
"""A node that failed so often in a run is not used for it again."""


@dataclass(frozen=True)
class Job:
    """This start of a job."""

    job: str
    """As Slurm's commands take it: ARRAY_NUMBER for a member of an array (`scheduler.fields`)."""
    nodes: list[str]
    processes: int
    attempt: int
    """The number that its training will have in attempts.jsonl."""
    words: str
    time: float = 0.0
    """Unix seconds; earlier versions did not note it, nor what follows."""
    command: str = ""
    """The job's script with its arguments, and the file that has its output; empty where Slurm did not say."""
    output: str = ""

    @property
    def identity(self) -> str:
        """The job's id and how often it had been started before."""
        return Path(self.words).name.removeprefix(WORDS)


def begin(config: Config) -> dict[str, str]:
    """In a job, before anything runs on its nodes: shell variables for the batch script.

    Notes the job in the run folder, blames the nodes that let the start before this one down, and requeues the job if
    one of them has done so twice and is among its nodes again. Raises ConfigError when Slurm's variables are missing,
    when the job's shape does not fit the config, or when there is no address by which its nodes could meet; FencedError
    in a start that a lost network has held up until the job was started again; StoppedEarly where a person had asked
    the start before it to stop, which was killed first.
    """
    job, nodes, processes = _shape(config)
    data_size = data_parallel_size(config, len(nodes) * processes)
    accumulation_steps(config, data_size)
    folder = config.run_folder.absolute()
    launch = folder / LAUNCH_FOLDER
    launch.mkdir(parents=True, exist_ok=True)
    history = History(folder)
    previous = last_job(folder)
    found = scheduler.known_fields(job)
    if int(found.get("Restarts", "0")) > _restarts():
        raise FencedError(f"Job {job} has been started again since, so this start of it ends.")
    if _restarts():  # Slurm may have decided that when the node that runs this script was gone
        say(f"job {job} was queued again; this is its start {_restarts() + 1}.")
    if previous:
        if previous.job != job:
            state = scheduler.patiently(scheduler.job_state, previous.job, previous.command)
            if state == "RUNNING":
                raise ConfigError(f"Job {previous.job} trains {folder} already; wait for it or choose another name.")
        elif reason := asked_by_user(folder, previous.attempt):
            history.decide(f"no further start: attempt {previous.attempt} was asked to stop ({reason})")
            withdraw(folder)
            raise StoppedEarly(f"Stopped on request ({reason}) before another start; `mesatron launch resume` goes on.")
        _blame(history, previous)
    excluded = [node for node in unfit_nodes(history) if node in nodes]
    if excluded:
        names = ", ".join(excluded)
        taken = _requeue(history, job, f": {names} failed {FAILURES_OF_A_NODE} times and is excluded", excluded)
        raise UnfitError(
            f"Job {job} was given {names} again, and is {'queued again without' if taken else 'not queued again'}."
        )
    words = launch / f"{WORDS}{_identity()}"
    words.mkdir(exist_ok=True)
    submitted = found.get("Command", ""), found.get("StdOut", "")
    note = Job(job, nodes, processes, history.newest_attempt + 1, str(words), time.time(), *submitted)
    replace_file(launch / JOB_FILE, [json.dumps(note.__dict__).encode()])
    threads = max(1, int(os.environ.get("SLURM_CPUS_ON_NODE", "1")) // processes)
    return {
        "run_folder": str(folder), "attempt": str(note.attempt), "processes": str(processes), "identity": _identity(),
        "endpoint": endpoint(_meeting_address(nodes), free_port(int(_variable("SLURM_JOB_ID")))), "words": str(words),
        "threads": str(threads), "preflight_seconds": str(config.launch.preflight_seconds),
    }  # fmt: skip


def settle(config: Config) -> int:
    """In a job, after its training or preflight has ended: requeue it if that is worth while; returns the exit code.

    srun answers with the largest code of all nodes, and 0 to some failures; attempts.jsonl and the processes' last
    words know more. Raises ConfigError outside a job, and FencedError on a node that the network had lost while the job
    was started again elsewhere: queueing it again from here would end that start.
    """
    folder = config.run_folder.absolute()
    history, note = History(folder), last_job(folder)
    if note is None:
        raise ConfigError(f"{folder} knows no job; `mesatron launch begin` comes first.")
    check_owner(folder, _identity())
    code = history.end_code(note.attempt)
    if code is None or code == LOST_PEER:
        code = LastWords.read(Path(note.words)).cause(LOST_PEER) or KILLED
    _blame(history, note)
    if code in FINAL_CODES:
        return code
    why = {
        FOR_CLUSTER: "stopped on the cluster's request", UnfitError.exit_code: "a node is unfit",
        StorageError.exit_code: "its storage failed", KILLED: "it failed or was killed",
    }.get(code, f"it ended with {code}")  # fmt: skip
    if not scheduler.patiently(scheduler.may_be_requeued, note.job):
        if int(scheduler.known_fields(note.job).get("Restarts", "0")) > _restarts():
            say(f"Slurm queues job {note.job} again by itself.")
        return code
    if reason := asked_by_user(folder, note.attempt):
        history.decide(f"no requeue ({why}): attempt {note.attempt} was asked to stop ({reason})")
        withdraw(folder)
        return FOR_USER if code == FOR_CLUSTER else code
    if history.requeues_without_progress() >= config.launch.max_requeues:
        history.decide(f"no requeue ({why}): {config.launch.max_requeues} brought no new checkpoint")
        return code
    excluded = unfit_nodes(history)
    _requeue(history, note.job, f" ({why})" + (f" without {', '.join(excluded)}" if excluded else ""), excluded)
    return code


def check_owner(folder: Path, identity: str) -> None:
    """Raise FencedError unless the start of a job with this identity is the newest on the run in `folder`.

    One that a lost network has held up must not take the run from the start that came after it.
    """
    note = last_job(folder)
    if note is None or note.identity != identity:
        raise FencedError(f"A later start of the job has taken over {folder}, so this one ends.")


def last_job(folder: Path) -> Job | None:
    """The newest start of a job on the run in `folder`, ended or not; None if there was none."""
    path = folder / LAUNCH_FOLDER / JOB_FILE
    return Job(**json.loads(path.read_text())) if path.exists() else None


def unfit_nodes(history: History) -> list[str]:
    """The nodes that the run should do without."""
    return sorted(node for node, times in history.failed_nodes().items() if times >= FAILURES_OF_A_NODE)


def _requeue(history: History, job: str, why: str, excluded: Sequence[str]) -> bool:
    """Queue this job again, not to run on the `excluded` nodes; returns whether Slurm does so.

    Decided before Slurm is asked, for it may end this process as it answers, and a requeue that is not logged would not
    be counted; taken back where it refuses.
    """
    signal.signal(signal.SIGTERM, signal.SIG_IGN)  # Slurm may send it at once, and goes on for KillWait
    history.decide(f"requeue{why}")
    try:
        scheduler.patiently(scheduler.requeue, job, _restarts())
    except ConfigError as error:
        history.decide(f"no requeue after all: {error}")
        return False
    if excluded:
        scheduler.patiently(scheduler.exclude, job, excluded)
    return True


def _identity() -> str:
    """Of this start of this job, on whichever node and however late."""
    return f"{_variable('SLURM_JOB_ID')}-{_restarts()}"


def _restarts() -> int:
    """How often Slurm had started this job before."""
    return int(os.environ.get("SLURM_RESTART_COUNT", "0"))


def _variable(name: str) -> str:
    """One of Slurm's. Raises ConfigError outside a job."""
    if name not in os.environ:
        raise ConfigError(f"{name} is not set; submit the script with sbatch.")
    return os.environ[name]


def _shape(config: Config) -> tuple[str, list[str], int]:
    """Job, node names and processes per node. Raises ConfigError where they are unknown or do not fit."""
    job, tasks = _variable("SLURM_JOB_ID"), _variable("SLURM_TASKS_PER_NODE")
    array = os.environ.get("SLURM_ARRAY_JOB_ID")  # a job that was submitted from within an array has that one's
    if array and scheduler.is_member(job, array):
        job = f"{array}_{_variable('SLURM_ARRAY_TASK_ID')}"
    if tasks.partition("(")[0] != "1" or "," in tasks:
        raise ConfigError(
            f"The job has {tasks} tasks per node, but one torchrun on each starts all processes there; submit it with "
            "--ntasks-per-node=1."
        )
    number = int(_variable("SLURM_JOB_NUM_NODES"))
    names = [_variable("SLURM_JOB_NODELIST")]
    if number > 1:
        names = scheduler.host_names(names[0])
    processes = config.launch.processes_per_node or int(os.environ.get("SLURM_GPUS_ON_NODE", "1"))
    return job, names, processes


def _meeting_address(nodes: Sequence[str]) -> str:
    """The address of this node, the job's first, for the others."""
    if len(nodes) == 1:
        return "127.0.0.1"
    other = nodes[1]
    address = source_address([other])
    if address is None:
        found = scheduler.patiently(scheduler.fields, "node", other)
        address = source_address([found.get("NodeAddr", other)])
    if address is None:
        raise ConfigError(
            f"{nodes[0]} has no way to {other} but over its loopback device; check that node names resolve to routable "
            "addresses."
        )
    return address


def _blame(history: History, note: Job) -> None:
    """Log which nodes failed in a start of a job, from the words its processes left, and forget those."""
    folder = Path(note.words)
    if not folder.exists():
        return
    found = folder / UNFIT_FILE
    if found.exists():
        try:
            unfit = json.loads(found.read_text())
        except ValueError:  # earlier versions did not write it in one step
            unfit = {}
            history.decide(f"no node is left out, for {found} is damaged")
        for node, reason in unfit.items():
            # What preflight finds needs no second time.
            history.decide(f"node {node} is unfit: {reason}", failed_node=node, failures=FAILURES_OF_A_NODE)
    else:
        for node in LastWords.read(folder).silent(note.nodes, note.processes):
            history.decide(f"node {node} failed: a process there ended without a word", failed_node=node, failures=1)
    forget(folder)
