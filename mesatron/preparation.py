"""What work on a corpus shows of itself, and how `mesatron data prepare` is told which part of it to do."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import typer
from mesatron_data.manifest import Manifest
from mesatron_data.progress import Progress

from mesatron.errors import ConfigError
from mesatron.terminal import bars


def task_numbers(value: str) -> tuple[int, int]:
    """K and N of an option K/N, K below N. Raises ConfigError for anything else."""
    number, slash, tasks = value.partition("/")
    if not (slash and number.isdecimal() and tasks.isdecimal()):
        raise ConfigError(f"--task {value} is not of the form K/N; give for example 0/16.")
    if int(number) >= int(tasks):
        raise ConfigError(f"--task {value}: there is no such task; N tasks count from 0 to N - 1.")
    return int(number), int(tasks)


@contextmanager
def preparation_bars() -> Iterator[Callable[[Progress], None]]:
    """`bars` for the steps of work on a corpus."""
    with bars() as show:

        def report(progress: Progress) -> None:
            figures = f"{progress.documents:,} documents"
            if progress.tokens is not None:
                figures += f", {progress.tokens:,} tokens"
            show(progress.step, progress.done, progress.total, figures)

        yield report


def print_manifest(folder: str, manifest: Manifest, what: str) -> None:
    """Print what a prepared folder holds and what was left out of it."""
    typer.echo(
        f"{folder} {what}: sequences of {manifest.context_length} tokens, fingerprint {manifest.fingerprint[:12]}"
    )
    for split, counts in manifest.splits.items():
        typer.echo(
            f"{split}: {counts.samples:,} sequences, {counts.documents:,} documents, {counts.tokens:,} tokens "
            f"({counts.dropped_tail_tokens} at the end fill no sequence)"
        )
        for source, figures in counts.sources.items():
            typer.echo(f"  {source}: {figures.documents:,} documents, {figures.tokens:,} tokens")
        for reason, number in counts.skipped.items():
            places = ", ".join(counts.skipped_places.get(reason, []))
            typer.echo(f"  skipped, {reason}: {number:,} ({places})")
        if counts.duplicates:
            typer.echo(f"  text that came before: {counts.duplicates:,} documents")
        for reason, documents in counts.removed.items():
            typer.echo(f"  left out, {reason}: {documents:,} documents")
        inputs = max(counts.samples, 1) * manifest.context_length
        typer.echo(
            f"  packing, {manifest.packing}: {counts.padding_tokens / inputs:.2%} padding, "
            f"{counts.cuts / max(counts.documents, 1):.2f} cuts a document"
        )
        for file, (read, length) in counts.truncated.items():
            typer.echo(f"  ends early, {file}: {read:,} of {length:,} bytes read")
        for reason, number in counts.normalised.items():
            typer.echo(f"  changed, {reason}: {number:,}")
