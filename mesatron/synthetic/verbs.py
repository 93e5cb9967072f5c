"""`mesatron evaluate mad`: mixers learn small tasks, and how well stands beside the paper's figures."""

from __future__ import annotations

import difflib
from pathlib import Path
from typing import Annotated

import typer

from mesatron.errors import ConfigError
from mesatron.files import replace_file
from mesatron.synthetic.paper import Sweep
from mesatron.terminal import table

TABLE_FILE = "mad-table.md"
"""The table of the last call, beside the results."""
MOST_EXAMPLES, MOST_TOKENS, MOST_EPOCHS = 1_000_000, 65_536, 100_000
"""Bounds of the options, far above the paper's sweep: what is larger overflows or does not end."""


def mad(
    output: Annotated[Path, typer.Option(metavar="FOLDER", help="Where results lie, a file for each training.")] = Path(
        "runs/mad"
    ),
    mixers: Annotated[
        str, typer.Option(help="Comma-separated; mesa+swa-64 alternates two, none is a model without mixer.")
    ] = "mesa",
    tasks: Annotated[str, typer.Option(help="Comma-separated, or all: MAD's six and mqar.")] = "all",
    sweep: Annotated[
        Sweep,
        typer.Option(
            help="optimizer: the paper's 4 learning rates x 2 decays; paper: these for every setting of each task."
        ),
    ] = "none",
    seed: Annotated[int, typer.Option(min=0, max=2**63 - 1)] = 0,
    epochs: Annotated[
        int | None, typer.Option(min=1, max=MOST_EPOCHS, help="200, and 64 for mqar, if not given.")
    ] = None,
    examples: Annotated[
        int | None, typer.Option(min=1, max=MOST_EXAMPLES, help="Training examples; else the task's own.")
    ] = None,
    test_examples: Annotated[
        int | None, typer.Option(min=1, max=MOST_EXAMPLES, help="1,280, and 3,000 for mqar, if not given.")
    ] = None,
    length: Annotated[
        int | None, typer.Option(min=1, max=MOST_TOKENS, help="Tokens of an example; else the task's own.")
    ] = None,
    vocabulary: Annotated[
        int | None, typer.Option(min=1, max=MOST_TOKENS, help="Tokens there are; else the task's own.")
    ] = None,
    learning_rate: Annotated[float, typer.Option(min=1e-5, max=1.0, help="At its peak, without a sweep.")] = 1e-3,
    weight_decay: Annotated[float, typer.Option(min=0.0, max=1.0, help="Without a sweep.")] = 0.1,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Train again what is there.")] = False,
) -> None:
    """Train small models on MAD's tasks and MQAR; what has been done before is not done again."""
    from mesatron.synthetic.tasks import TASKS
    from mesatron.synthetic.trials import comparison, footnote, markdown, plan, results, scores

    chosen = list(TASKS) if tasks == "all" else _names("--tasks", tasks)
    for name in chosen:
        if name not in TASKS:
            near = difflib.get_close_matches(name, TASKS, n=1)
            hint = f"did you mean {near[0]}?" if near else f"there are {', '.join(TASKS)}."
            raise ConfigError(f"--tasks has {name!r}, which is no task; {hint}")
    asked = {"examples": examples, "length": length, "vocabulary_size": vocabulary}
    changed = {field: value for field, value in asked.items() if value is not None}
    trials = plan(
        [TASKS[name](**changed) for name in chosen], _names("--mixers", mixers), sweep, epochs, test_examples,
        learning_rate, weight_decay, seed,
    )  # fmt: skip
    output.mkdir(parents=True, exist_ok=True)
    outcomes = []
    for trial, result in results(trials, output, overwrite, lambda line: typer.echo(line, err=True)):
        outcomes.append((trial, result))
        typer.echo(
            f"{len(outcomes)} of {len(trials)}  {trial.task.name}  {trial.mixer}  accuracy {result['accuracy']:.4f}  "
            f"{result['seconds']:.0f} s  {trial.file(output)}"
        )
    rows = comparison(scores(outcomes))
    note = footnote(trials, sweep)
    table(rows)
    typer.echo(note)
    replace_file(output / TABLE_FILE, [f"{markdown(rows)}\n{note}\n".encode()])


def _names(option: str, text: str) -> list[str]:
    names = [name.strip() for name in text.split(",")]
    if not all(names):
        raise ConfigError(f"{option} is {text!r}, which has an empty name; separate names by single commas.")
    return list(dict.fromkeys(names))
