"""What is asked of Slurm, by its own commands."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import ParamSpec, TypeVar

from mesatron.errors import ConfigError, report

SCRIPT = "train.sbatch"
QUEUED = {"PENDING", "REQUEUED", "REQUEUE_HOLD", "CONFIGURING"}
ALIVE = QUEUED | {"RUNNING", "SUSPENDED", "COMPLETING", "RESIZING", "STAGE_OUT"}
REFUSALS = (
    "Invalid job id", "not found", "Invalid node name", "denied", "disabled", "not supported", "pending execution",
    "already completing",
)  # fmt: skip
"""What a controller that has understood says no with; all else may be one that is away or too busy."""
PATIENCE_SECONDS, RETRY_SECONDS = 600, 5
"""For so long, and so often, a job asks a controller that does not answer."""

P = ParamSpec("P")
T = TypeVar("T")


class UnansweredError(ConfigError):
    """Slurm has neither done what was asked nor refused it."""


def ask(*command: str, environment: Mapping[str, str] | None = None) -> str:
    """What a command of Slurm prints.

    Raises ConfigError when it is not there or refuses, and UnansweredError when the controller may not have heard it.
    """
    if shutil.which(command[0]) is None:
        raise ConfigError(
            f"{command[0]} is not on PATH of {os.uname().nodename}, and without it nothing is known of the job's "
            "nodes; run this outside of a container, on a node that has Slurm's commands."
        )
    done = subprocess.run(command, capture_output=True, text=True, env=environment)
    if done.returncode != 0:
        reason = " ".join((done.stderr or done.stdout).split()) or f"exit code {done.returncode}"
        if any(refusal in reason for refusal in REFUSALS) or command[0] != "scontrol":
            raise ConfigError(f"Slurm refuses `{' '.join(command)}`: {reason}")
        raise UnansweredError(f"Slurm fails at `{' '.join(command)}`: {reason}")
    return done.stdout


def patiently(action: Callable[P, T], *arguments: P.args, **options: P.kwargs) -> T:
    """What `action` returns, begun anew while it raises UnansweredError, for PATIENCE_SECONDS at most.

    For a job, which would be lost to a controller that is restarted at the wrong moment; a person can ask again.
    """
    end, told = time.monotonic() + PATIENCE_SECONDS, False
    while True:
        try:
            return action(*arguments, **options)
        except UnansweredError as error:
            if time.monotonic() > end:
                raise
            if not told:
                report(UnansweredError(f"{error}; asked again for {PATIENCE_SECONDS} s."))
            told = True
        time.sleep(RETRY_SECONDS)


def host_names(node_list: str) -> list[str]:
    """The names in a list such as n[1-3,7]."""
    return ask("scontrol", "show", "hostnames", node_list).split()


def fields(kind: str, name: str) -> dict[str, str]:
    """The fields of `scontrol show job` or `node`; nothing for a job that Slurm no longer knows.

    A member of an array is to be named ARRAY_NUMBER in whatever is asked of Slurm: the last one's own id is the array's
    too, and by that Slurm shows, queues again or cancels all of them. Here it means the last one alone.
    """
    try:
        text = ask("scontrol", "--oneliner", "show", kind, name)
    except ConfigError as error:
        if "Invalid job id" in str(error) or f"Job {name} not found" in str(error):  # the latter of an array's member
            return {}
        raise
    for record in re.split(r"\n(?=JobId=)", text.strip()):
        words = re.split(r"\s+(?=[A-Z][\w:/]*=)", record)  # paths and arguments may have spaces
        found = dict(word.split("=", 1) for word in words if "=" in word)
        if "_" in name or found.get("JobId", name) == name:
            return found
    return {}


def is_member(job: str, array: str) -> bool:
    """Whether the job with this id of its own belongs to the array; so it is taken where Slurm does not answer."""
    found = {"ArrayJobId": array}
    with suppress(ConfigError):
        found = patiently(fields, "job", job)
    return found.get("ArrayJobId") == array


def known_fields(job: str) -> dict[str, str]:
    """The fields of a job; nothing, too, where Slurm does not answer, which is no reason to end the job."""
    found: dict[str, str] = {}
    with suppress(ConfigError):
        found = fields("job", job)
    return found


def job_fields(job: str, command: str) -> dict[str, str]:
    """The fields of the job that was submitted as `command`: its script with its arguments.

    Nothing if Slurm has forgotten it, or has begun to count anew and given its id to another. Where the command is not
    known, which earlier versions did not note, a job whose script is called SCRIPT is taken for it.
    """
    found = fields("job", job)
    theirs = found.get("Command", "")
    return found if (theirs == command if command else SCRIPT in theirs) else {}


def job_state(job: str, command: str) -> str:
    """Such as PENDING, RUNNING or COMPLETED; UNKNOWN for a job that Slurm has forgotten. See `job_fields`."""
    return job_fields(job, command).get("JobState", "UNKNOWN")


def waits_for(found: Mapping[str, str]) -> str:
    """Why a job with these fields waits, such as Resources; empty if it does not, or Slurm has not looked at it yet."""
    reason = found["Reason"] if found.get("JobState") in QUEUED else "None"
    return "" if reason == "None" else reason


def is_held(found: Mapping[str, str]) -> bool:
    """Whether a job with these fields waits for somebody to release it."""
    return found.get("JobState") in QUEUED and found["Priority"] == "0"


def is_held_by_slurm(found: Mapping[str, str]) -> bool:
    """Whether Slurm, and no person, holds the job: a node failed to launch it, or to find its user's environment."""
    return is_held(found) and found["Reason"].endswith("failed_requeued_held")


def may_be_requeued(job: str) -> bool:
    """Whether a job that is about to end would stay ended against nobody's will.

    Not one that was cancelled, or that Slurm queues again by itself; but one that its time limit ends.
    """
    found = fields("job", job)
    return found.get("JobState") == "RUNNING" or found.get("Reason") == "TimeLimit"


def requeue(job: str, restarts: int) -> None:
    """End a job's start number `restarts`, as Slurm counts them from 0, and queue it again.

    May be called again after an UnansweredError: what Slurm had heard all the same is not asked twice, for that would
    end the next start.
    """
    if int(fields("job", job).get("Restarts", restarts)) == restarts:
        ask("scontrol", "requeue", job)


def exclude(job: str, nodes: Sequence[str]) -> None:
    """Keep a pending job, such as one that is just queued again, from `nodes`; Slurm refuses it for any other."""
    already = fields("job", job).get("ExcNodeList", "(null)")
    names = ",".join([*nodes, *([] if already == "(null)" else [already])])
    ask("scontrol", "update", f"JobId={job}", f"ExcNodeList={names}")
