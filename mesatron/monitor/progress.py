"""What a person sees while a run goes on: a bar in a terminal, plain lines of always the same fields elsewhere."""

import os
import sys
import time
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, TextColumn
from rich.progress import Progress as RichProgress

from mesatron.errors import say
from mesatron.metrics import perplexity


@dataclass(frozen=True)
class Reading:
    """The figures of one logged step.

    loss: mean over target tokens, in nats. tokens_per_second: over all processes. data_share: the part of the step's
    time that went into waiting for data, from 0 to 1.
    """

    step: int
    loss: float
    learning_rate: float
    grad_norm: float
    tokens_per_second: float
    data_share: float


def plain_line(reading: Reading, steps: int, eta_seconds: float) -> str:
    """`step 120/600  loss 4.512  ppl 91.1  lr 2.9e-03  grad 0.83  tok/s 5213  data 1%  eta 0:03:12`."""
    return f"step {reading.step}/{steps}  {_figures(reading)}  eta {timedelta(seconds=round(eta_seconds))}"


class Log(Console):
    """Standard output, cut by no terminal's width and coloured by nothing in a file. A run outlives its readers: when
    a pipe has none left, a terminal has gone or a disk is full, that is said once on standard error."""

    def __init__(self) -> None:
        super().__init__(soft_wrap=True, highlight=False)

    def __exit__(self, *error: Any) -> None:
        """Write what has been printed; once that fails, write nowhere from then on."""
        try:
            super().__exit__(*error)
        except OSError as fault:
            nowhere = os.open(os.devnull, os.O_WRONLY)
            os.dup2(nowhere, sys.stdout.fileno())
            os.close(nowhere)
            say(f"the output cannot be written any more ({fault.strerror}); the run goes on.")

    def on_broken_pipe(self) -> None:
        """Leave it to `__exit__`, instead of ending the process, which is what the base class does."""
        raise


class Progress:
    """Shows the steps `first_step` + 1 to `steps`; use it as a context manager, which gives the terminal back.

    The expected time is the mean time of this attempt's steps so far, validation and saving included.
    """

    def __init__(self, steps: int, first_step: int, console: Console | None = None) -> None:
        self._steps = steps
        self._first_step = first_step
        self._started = time.monotonic()
        self._console = console or Log()
        self._bar = RichProgress(
            TextColumn("step {task.completed}/{task.total}"),
            BarColumn(),
            TextColumn("{task.fields[figures]}"),
            console=self._console,
            disable=not self._console.is_terminal,
        )
        self._task = self._bar.add_task("train", total=steps, completed=first_step, figures="")

    def __enter__(self) -> "Progress":
        self._bar.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._bar.stop()

    def update(self, reading: Reading) -> None:
        """Show a step's figures: the bar moves, or a line is printed."""
        eta = self._eta_seconds(reading.step)
        if self._console.is_terminal:
            figures = f"{_figures(reading)}  eta {timedelta(seconds=round(eta))}"
            self._bar.update(self._task, completed=reading.step, figures=figures)
        else:
            self.say(plain_line(reading, self._steps, eta))

    def say(self, text: str) -> None:
        """Print a line, above the bar if there is one."""
        self._console.print(text, markup=False, highlight=False, soft_wrap=True)

    def _eta_seconds(self, step: int) -> float:
        elapsed = time.monotonic() - self._started
        return elapsed / max(step - self._first_step, 1) * (self._steps - step)


def _figures(reading: Reading) -> str:
    return (
        f"loss {reading.loss:.3f}  ppl {perplexity(reading.loss):.1f}  lr {reading.learning_rate:.1e}  "
        f"grad {reading.grad_norm:.2f}  "
        f"tok/s {reading.tokens_per_second:.0f}  data {reading.data_share:.0%}"
    )
