"""`mesatron launch status` and `stop`: a run looked at and ended from outside of its job."""

from __future__ import annotations

import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path

from mesatron.cluster import scheduler
from mesatron.cluster.history import History
from mesatron.cluster.job import last_job
from mesatron.cluster.request import FOR_USER, request_stop
from mesatron.cluster.submission import Submission, array_folders, newest_job, release_command
from mesatron.errors import ConfigError, last_report
from mesatron.monitor.metrics import read_metrics
from mesatron.summary import summarize
from mesatron.train.stop import concerns, read_request

SHOWN_DECISIONS = 5


def status(folder: Path) -> list[tuple[str, str]]:
    """Lines of a name and a text each; in the folder of an array, one for each of its runs.

    Raises ConfigError when `folder` is no run's or array's.
    """
    if runs := array_folders(folder):
        return [("array", str(folder)), *(("run", f"{run}, job {_job_text(run, *_look(run)[:2])}") for run in runs)]
    history, (job, found, attempt) = History(folder), _look(folder)
    lines = [("run", str(folder))]
    if job:
        lines.append(("job", _job_text(folder, job, found)))
        output = Path(job.output)
        if output.exists():
            lines.append(("output", job.output))
            # Otherwise the attempt's own end, below, has the reason.
            if found.get("JobState") not in scheduler.ALIVE and history.end_code(attempt) is None:
                words = last_report(output.read_text(errors="replace"))
                lines += [("said", words)] if words else []
    if history.records() and (folder / "config.yaml").exists():
        result = summarize(folder)
        reached = max([result.step, *(line["step"] for line in read_metrics(folder / "metrics.jsonl")[-1:])])
        lines.append(("step", f"{reached} of {result.steps}; {result.step or 'none'} is saved"))
    elif not job:
        raise ConfigError(f"{folder} is no run folder: it has neither attempts nor a job; check the path.")
    ends = history.records("end")
    last = f"; the last that ended: {ends[-1]['reason']}" if ends else ""
    lines.append(("attempts", f"{history.newest_attempt}{last}"))
    if job and found.get("JobState") == "RUNNING":
        lines += _under_way(history, attempt)
    decisions = history.records("decision")[-SHOWN_DECISIONS:]
    lines += [("decided", f"{record['what']} (attempt {record['attempt'] or 0})") for record in decisions]
    return lines


def _under_way(history: History, attempt: int) -> list[tuple[str, str]]:
    """Lines of a running job, whose newest start makes `attempt`: what it trains, unless that has ended already."""
    begins = attempt > history.newest_attempt
    number = max(attempt, history.newest_attempt)
    if not begins and not history.is_running:
        return []
    step = history.first_step(number)
    begun = f"attempt {number}{' begins' if begins else ''}, from {f'step {step}' if step else 'the start'}"
    request = read_request(history.folder)
    asked = [("asked", f"to stop ({request['reason']})")] if request and concerns(request, number) else []
    return [("running", begun), *asked]


def stop(folder: Path) -> Iterator[str]:
    """Ask the training in `folder` to save and end, or cancel its waiting job; yields what was done, in a sentence.

    In the folder of an array that is a sentence for each of its runs, before the next one is looked at: Slurm may
    refuse. Raises ConfigError when nothing waits or runs.
    """
    runs = array_folders(folder)
    found = False
    for run in runs or [folder]:
        done = _stop(run)
        found |= bool(done)
        if runs:
            yield f"{run}: {done or 'Nothing trains there, and no job waits to.'}"
        elif done:
            yield done
    if not found:
        raise ConfigError(f"Nothing trains in {folder}, and no job waits to.")


def _stop(folder: Path) -> str:
    """What was done to end the run in `folder`; empty when nothing waits or runs there."""
    history, (submitted, found, attempt) = History(folder), _look(folder)
    state, job = found.get("JobState"), submitted.job if submitted else ""
    if state in scheduler.QUEUED:
        scheduler.ask("scancel", job)
        return f"Job {job} was waiting and is cancelled."
    if state != "RUNNING":
        if not history.is_running:
            if state == "COMPLETING":
                raise ConfigError(f"Job {job} of {folder} is just ending and may start again; repeat this in a moment.")
            return ""
        attempt = history.newest_attempt
    request_stop(folder, "mesatron launch stop", FOR_USER, attempt)
    return f"Attempt {attempt} will save after its next step and end."


def _job_text(folder: Path, job: Submission | None, found: Mapping[str, str]) -> str:
    """The job of the run in `folder`, whose fields are `found`: its id, its state, where it runs or why it waits."""
    if job is None:
        return "none"
    state = found.get("JobState", "UNKNOWN" if _slurm_is_here() else "unknown, for Slurm's commands are not here")
    where = f" on {' '.join(scheduler.host_names(found['NodeList']))}" if state == "RUNNING" else ""
    reason, release = scheduler.waits_for(found), release_command(job, found, folder)
    why = f" ({reason})" if reason else ""
    remedy = f"; `{release}` releases it" if release else ""
    return f"{job.job}, {state}{where}{why}{remedy}"


def _look(folder: Path) -> tuple[Submission | None, dict[str, str], int]:
    """A run's newest job, what Slurm says of it, and the number of the attempt that its newest start makes."""
    job, note = newest_job(folder), last_job(folder)
    found = scheduler.job_fields(job.job, job.command) if job and _slurm_is_here() else {}
    if note and job:
        # A job that was queued again may have started without having noted it yet.
        is_noted = note.identity == f"{found['JobId']}-{found['Restarts']}" if found else note.job == job.job
        if is_noted:
            return job, found, note.attempt
    return job, found, History(folder).newest_attempt + 1


def _slurm_is_here() -> bool:
    return shutil.which("scontrol") is not None
