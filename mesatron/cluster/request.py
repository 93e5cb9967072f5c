"""The stop request: a file in the run folder that a training looks for at every step."""

from __future__ import annotations

import json
from pathlib import Path

from mesatron.errors import StoppedEarly
from mesatron.files import replace_file

REQUEST_FILE = "stop-request.json"
FOR_CLUSTER, FOR_USER = 76, StoppedEarly.exit_code
"""Exit codes to end with: start the same job again, or do not."""


def request_stop(run_folder: Path, reason: str, code: int, attempt_at_most: int | None) -> None:
    """Ask the training in `run_folder` to save at its next step and end with `code`.

    A later attempt than `attempt_at_most` does not heed it. Raises DiskFullError.
    """
    request = {"reason": reason, "code": code, "attempt_at_most": attempt_at_most}
    replace_file(run_folder / REQUEST_FILE, [json.dumps(request).encode()])
