"""Asking a training to stop, by the file in its run folder that it looks for at every step."""

from __future__ import annotations

import json
from pathlib import Path

from mesatron.errors import PreemptedError, StoppedEarly
from mesatron.files import replace_file
from mesatron.monitor.attempts import read_attempts
from mesatron.train.stop import REQUEST_FILE, concerns, read_request

FOR_CLUSTER, FOR_USER = PreemptedError.exit_code, StoppedEarly.exit_code
"""Exit codes to end with: start the same job again, or do not."""


def request_stop(run_folder: Path, reason: str, code: int, attempt_at_most: int) -> None:
    """Ask the training in `run_folder` to save at its next step and end with `code`.

    A later attempt than `attempt_at_most` does not heed it. Nothing is asked once that attempt has ended or another has
    come after it: on a node that the network had lost, a script may learn late that its job is over. Nor does the
    cluster take the place of a person, who has been told that the run will end. Raises DiskFullError.
    """
    for record in read_attempts(run_folder / "attempts.jsonl"):
        ended = record["event"] == "end" and record["attempt"] == attempt_at_most
        if ended or record["attempt"] > attempt_at_most:
            return
    if code == FOR_CLUSTER and asked_by_user(run_folder, attempt_at_most):
        return
    request = {"reason": reason, "code": code, "attempt_at_most": attempt_at_most}
    replace_file(run_folder / REQUEST_FILE, [json.dumps(request).encode()])


def asked_by_user(run_folder: Path, attempt: int) -> str:
    """The reason that a person gave for a stop of this attempt which has not been heeded yet; empty if nobody did."""
    request = read_request(run_folder)
    if request is None or request["code"] != FOR_USER or not concerns(request, attempt):
        return ""
    return str(request["reason"])


def withdraw(run_folder: Path) -> None:
    """Ask no longer."""
    (run_folder / REQUEST_FILE).unlink(missing_ok=True)
