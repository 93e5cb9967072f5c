"""`mesatron launch status` and `stop`: a run looked at and ended from outside of its job."""

from __future__ import annotations

import shutil
from pathlib import Path

from mesatron.cluster import scheduler
from mesatron.cluster.history import History
from mesatron.cluster.job import last_job
from mesatron.cluster.request import FOR_USER, request_stop
from mesatron.cluster.submission import newest_job
from mesatron.errors import ConfigError
from mesatron.summary import summarize

SHOWN_DECISIONS = 5


def status(folder: Path) -> list[tuple[str, str]]:
    """Lines of a name and a text each. Raises ConfigError when `folder` is no run's."""
    history, job, note = History(folder), newest_job(folder), last_job(folder)
    lines = [("run", str(folder))]
    if job is not None:
        state = scheduler.job_state(job) if shutil.which("scontrol") else "unknown, for Slurm's commands are not here"
        where = f" on {' '.join(note.nodes)}" if note and note.job == job and state == "RUNNING" else ""
        lines.append(("job", f"{job}, {state}{where}"))
    if (folder / "config.yaml").exists():
        result = summarize(folder)
        lines.append(("step", f"{result.step} of {result.steps} is saved"))
    elif job is None:
        raise ConfigError(f"{folder} is no run folder: it has neither a config.yaml nor a job; check the path.")
    ends = history.records("end")
    last = f"; the last that ended: {ends[-1]['reason']}" if ends else ""
    lines.append(("attempts", f"{history.newest_attempt}{last}"))
    lines += [("decided", record["what"]) for record in history.records("decision")[-SHOWN_DECISIONS:]]
    return lines


def stop(folder: Path) -> str:
    """Ask the training in `folder` to save and end, or cancel its waiting job; returns what was done, in a sentence.

    Raises ConfigError when nothing waits or runs there.
    """
    history, job, note = History(folder), newest_job(folder), last_job(folder)
    state = scheduler.job_state(job) if job is not None and shutil.which("scontrol") else None
    if job is not None and state in scheduler.QUEUED:
        scheduler.ask("scancel", job)
        return f"Job {job} was waiting and is cancelled."
    attempt = history.newest_attempt
    if state == "RUNNING" and note:
        attempt = note.attempt  # which may be starting still
    elif not history.is_running:
        raise ConfigError(f"Nothing trains in {folder}, and no job waits to.")
    request_stop(folder, "mesatron launch stop", FOR_USER, attempt)
    return f"Attempt {attempt} will save after its next step and end."
