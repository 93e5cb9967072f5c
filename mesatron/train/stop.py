"""What asks a run to stop before its last step: a signal to any of its processes, or a file in its folder.

Free of torch, so that a process listens before it spends seconds on importing it.
"""

from __future__ import annotations

import json
import signal
from contextlib import suppress
from pathlib import Path
from types import FrameType
from typing import Any

from mesatron.config import Config
from mesatron.errors import FencedError, MesatronError, PreemptedError, StoppedEarly
from mesatron.monitor.attempts import Attempt

REQUEST_FILE = "stop-request.json"
"""In the run folder: {"reason": "...", "code": 75 or 76, "attempt_at_most": N or null}, see `StopFlag.votes`."""

ENDINGS: tuple[type[MesatronError], ...] = (FencedError, StoppedEarly, PreemptedError)
"""Ways in which all processes can agree to end after a step; of several that are asked for the first one holds."""


def stop_signals(config: Config) -> set[signal.Signals]:
    """The signals at which a run saves and ends: `launch.stop_signal`, and SIGTERM."""
    return {signal.Signals[f"SIG{config.launch.stop_signal}"], signal.SIGTERM}


def agreed(votes: list[float]) -> type[MesatronError] | None:
    """What the `StopFlag.votes` of all processes, added up, come to: one of ENDINGS, or None to go on."""
    return next((ending for ending, count in zip(ENDINGS, votes, strict=True) if count), None)


def read_request(run_folder: Path) -> dict[str, Any] | None:
    """The request, if there is one; what is malformed is none, such as what a shell has written only in part."""
    # Opened, not looked for: network file systems remember for a while that a file is not there.
    with suppress(FileNotFoundError, ValueError):
        request = json.loads((run_folder / REQUEST_FILE).read_text())
        if isinstance(request, dict) and isinstance(request.get("attempt_at_most"), int | None):
            return {"reason": "a stop request", "code": StoppedEarly.exit_code, "attempt_at_most": None} | request
    return None


def concerns(request: dict[str, Any], attempt: int) -> bool:
    """Whether the request is to this attempt; one without `attempt_at_most` is to whichever reads it."""
    last = request["attempt_at_most"]
    return last is None or last >= attempt


class StopFlag:
    """What this process knows of requests to stop; it listens to signals from its construction on.

    A signal, however often it comes, only sets a flag. The processes act on it when all have agreed, between steps.
    """

    def __init__(self, config: Config) -> None:
        self._run_folder = config.run_folder
        self._signal: signal.Signals | None = None
        self._attempt: Attempt | None = None
        self._request: dict[str, Any] | None = None
        self._fenced: FencedError | None = None
        for number in stop_signals(config):
            signal.signal(number, self._note)

    def watch_folder(self, attempt: Attempt) -> list[str]:
        """In the first process: from now on heed requests to stop `attempt`, and newer attempts in its folder.

        A request to an older attempt is removed, with a note in what is returned.
        """
        self._attempt = attempt
        request = read_request(self._run_folder)
        if request is None or concerns(request, attempt.number):
            return []
        self._remove_request()
        return [f"Removed a request to stop attempt {request['attempt_at_most']} ({request['reason']})."]

    def votes(self) -> list[float]:
        """1 for each of ENDINGS that this process asks for, else 0."""
        if self._attempt is not None:
            try:
                self._attempt.check_newest()
            except FencedError as error:
                self._fenced = error
            request = read_request(self._run_folder)
            if request is not None and concerns(request, self._attempt.number):
                self._request = request
        of_cluster = self._request is not None and self._request["code"] == PreemptedError.exit_code
        of_user = self._request is not None and not of_cluster
        return [float(vote) for vote in (self._fenced is not None, of_user, of_cluster or self._signal is not None)]

    def error(self, ending: type[MesatronError], step: int, config: Config) -> MesatronError:
        """What to raise after `step`, which is saved unless the run is fenced, when all have agreed on `ending`."""
        if ending is FencedError:
            return self._fenced or FencedError("A newer attempt has taken over.")
        reason = self._signal.name if self._signal else "a signal to another process"
        if self._request:
            reason = self._request["reason"]
        whose = "the cluster's request" if ending is PreemptedError else "request"
        state = f"after step {step} of {config.train.steps}, which is saved" if step else "before the first step"
        again = "the same job, started again, goes on" if ending is PreemptedError else "the same command goes on"
        return ending(f"Stopped on {whose} ({reason}) {state}; {again} from there.")

    def honoured(self, exit_code: int) -> None:
        """The run has ended as the request asked, or with its last step: the request is removed.

        So is one that came too late to be heeded, unless it is to a later attempt too, or a person's to a run that now
        ends on the cluster's request: the job must not be queued again.
        """
        late, attempt = read_request(self._run_folder), self._attempt
        if late and late["code"] == StoppedEarly.exit_code and exit_code == PreemptedError.exit_code:
            return
        if self._request or (late and attempt and late["attempt_at_most"] in (None, attempt.number)):
            self._remove_request()

    def _note(self, number: int, _: FrameType | None) -> None:
        self._signal = signal.Signals(number)

    def _remove_request(self) -> None:
        (self._run_folder / REQUEST_FILE).unlink(missing_ok=True)
