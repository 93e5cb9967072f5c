"""`mesatron tokenizer` and `mesatron data`: from raw text to verified shards."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from mesatron.errors import ConfigError, DataError
from mesatron.terminal import ConfigFile, Overrides, Overwrite, Workers, table

tokenizer_app = typer.Typer(no_args_is_help=True, help="Make tokenizers.")
data_app = typer.Typer(no_args_is_help=True, help="Turn text into shards and look at them.")


@tokenizer_app.command("train")
def tokenizer_train(
    file: ConfigFile, workers: Workers, overrides: Overrides = None, overwrite: Overwrite = False
) -> None:
    """Train the SentencePiece model that the config names on its raw text."""
    import resource

    from mesatron_data.tokenizer import MODEL_FILE, Tokenizer, trained_as
    from mesatron_data.tokenizer_training import tokenizer_request, train_tokenizer

    from mesatron.config import load_config
    from mesatron.preparation import preparation_bars

    config = load_config(file, overrides or [])
    folder, size = config.tokenizer.path, config.model.vocabulary_size
    if folder.is_file():
        raise DataError(f"tokenizer.path {folder} is a tokenizer already; use it as it is, or name a folder.")
    request = tokenizer_request(
        config.data.input_folder, size, config.train.seed, config.tokenizer.sample_bytes, config.data.weights
    )
    if (folder / MODEL_FILE).exists() and not overwrite:
        if trained_as(folder).get("request") != request:
            raise DataError(
                f"{folder} holds another tokenizer than the config asks for; choose another tokenizer.path, or pass "
                "--overwrite to replace it."
            )
        Tokenizer.load(folder)
        typer.echo(f"{folder} is there already: {size} pieces.")
        return
    with preparation_bars() as progress:
        trained = train_tokenizer(
            config.data.input_folder, folder, size, seed=config.train.seed,
            max_sample_bytes=config.tokenizer.sample_bytes, max_skipped_fraction=config.data.max_skipped_fraction,
            allow_truncated_files=config.data.allow_truncated_files, weights=config.data.weights,
            workers=workers, progress=progress,
        )  # fmt: skip
    typer.echo(
        f"{folder}: {trained.vocabulary_size} pieces from {trained.sample_documents:,} of {trained.documents:,} "
        f"documents ({trained.sample_bytes / 1e6:.1f} MB)."
    )
    for name, source in trained.sources.items():
        typer.echo(
            f"  {name}: {source.sample_bytes / 1e6:.1f} of {source.bytes / 1e6:.1f} MB "
            f"({source.sample_bytes / max(source.bytes, 1):.1%})"
        )
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    typer.echo(f"  peak memory {peak / 1e9:.2f} GB")


@data_app.command("prepare")
def data_prepare(
    file: ConfigFile,
    workers: Workers,
    overrides: Overrides = None,
    overwrite: Overwrite = False,
    task: Annotated[
        str | None, typer.Option(metavar="K/N", help="Only tokenize the files of task K (from 0) of N.")
    ] = None,
    merge: Annotated[bool, typer.Option("--merge", help="Only pack what all tasks have tokenized.")] = False,
) -> None:
    """Tokenize and pack the raw text into verified shards; a killed run goes on where it stopped."""
    from mesatron_data.choice import Cleaning
    from mesatron_data.plan import Options
    from mesatron_data.shards import prepare, tokenize_share
    from mesatron_data.tokenizer import Tokenizer

    from mesatron.config import load_config
    from mesatron.preparation import preparation_bars, print_manifest, task_numbers

    config = load_config(file, overrides or [])
    if task is not None and merge:
        raise ConfigError("--task and --merge exclude each other; run all tasks first, then --merge.")
    data, tokenizer = config.data, config.tokenizer.path
    size = Tokenizer.load(tokenizer).vocabulary_size
    if size != config.model.vocabulary_size:
        raise DataError(
            f"model.vocabulary_size is {config.model.vocabulary_size}, but {tokenizer} has {size} pieces; "
            "change it or train another tokenizer."
        )
    paths = (data.input_folder, data.folder, tokenizer, data.context_length)
    cleaning = Cleaning(data.min_document_tokens, data.max_document_tokens, data.remove_duplicates)
    options = Options(data.packing, data.weights is not None, cleaning, data.token_folder)
    with preparation_bars() as progress:
        if task is not None:
            number, tasks = task_numbers(task)
            files = tokenize_share(
                *paths, number, tasks, overwrite=overwrite, workers=workers, progress=progress, options=options
            )
        else:
            result = prepare(
                *paths, max_skipped_fraction=data.max_skipped_fraction, overwrite=overwrite, workers=workers,
                merge_only=merge, allow_truncated_files=data.allow_truncated_files, progress=progress,
                options=options,
            )  # fmt: skip
    if task is not None:
        typer.echo(f"Task {task}: {files} files are tokenized; after all tasks run --merge.")
    else:
        print_manifest(data.folder, result.manifest, "was there already" if result.reused else "written")


@data_app.command("verify")
def data_verify(
    folder: Annotated[str, typer.Argument(metavar="FOLDER", help="Prepared shards, a path or a URL.")],
) -> None:
    """Check every byte and every sequence of prepared shards."""
    from mesatron_data.verify import verify

    report = verify(folder)
    typer.echo(
        f"{folder}: {report.shards} shards, {report.samples:,} sequences, {report.bytes / 1e6:.1f} MB are sound."
    )


@data_app.command("inspect")
def data_inspect(
    folder: Annotated[str, typer.Argument(metavar="FOLDER", help="Prepared shards, a path or a URL.")],
    samples: Annotated[int, typer.Option(min=0, help="Sequences to show decoded.")] = 2,
    html: Annotated[Path | None, typer.Option(help="Write a page with plots to this file instead.")] = None,
    overwrite: Overwrite = False,
) -> None:
    """Sources, document lengths, token frequencies and decoded sequences of prepared shards."""
    from mesatron_data.inspect import inspect

    from mesatron.preparation import print_manifest

    if html is not None and html.exists() and not overwrite:
        raise ConfigError(f"{html} exists; name another file, or pass --overwrite to replace it.")
    found = inspect(folder, samples)
    if html is not None:
        from mesatron_data.page import page

        html.write_text(page(folder, found), encoding="utf-8")
        typer.echo(f"{html} written.")
        return
    print_manifest(folder, found.manifest, "holds")
    for split, counts in found.manifest.splits.items():
        lengths = ", ".join(f"<={length}: {number:,}" for length, number in counts.document_lengths.items())
        typer.echo(f"{split} document lengths in tokens  {lengths}")
    tokens = "  ".join(f"{piece!r} {share:.2%}" for piece, share in found.frequent_tokens)
    typer.echo(f"frequent tokens  {tokens}\nunused tokens    {found.unused_tokens}")
    typer.echo(f"targets without loss (BOS)  {found.ignored_targets:.2%}")
    for number, sample in enumerate(found.samples):
        typer.echo(f"--- sequence {number}")
        for piece in sample:
            typer.echo(f"[{piece.source}{', document begins' if piece.begins else ', continued'}] {piece.text}")


@data_app.command("duplicates")
def data_duplicates(
    file: ConfigFile,
    workers: Workers,
    overrides: Overrides = None,
    documents: Annotated[int, typer.Option(min=2, help="Documents to compare with each other.")] = 10_000,
    threshold: Annotated[
        float, typer.Option(min=0.1, max=1.0, help="Share of runs of words in common that counts.")
    ] = 0.8,
) -> None:
    """Documents of a sample of the raw text that are nearly the same as another of it, by source."""
    from mesatron_data.near import find_near_duplicates

    from mesatron.config import load_config
    from mesatron.preparation import preparation_bars

    folder = load_config(file, overrides or []).data.input_folder
    with preparation_bars() as progress:
        found = find_near_duplicates(folder, documents, threshold, workers, progress)
    table([
        ("source", "documents", "nearly the same as an earlier one"),
        *(
            (source, f"{number:,}", f"{found.repeated.get(source, 0):,} ({found.repeated.get(source, 0) / number:.2%})")
            for source, number in sorted(found.documents.items())
        ),
    ])  # fmt: skip
    for place, earlier, likeness in found.pairs:
        typer.echo(f"{place} is {likeness:.0%} of {earlier}")
