"""`mesatron <verb>`: thin, and without torch until a verb needs it."""

from __future__ import annotations

import json
import os
import sys
import traceback
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Literal

import typer

from mesatron.bench import bench_app
from mesatron.cluster.verbs import launch_app
from mesatron.cluster.words import leave_word
from mesatron.doctor import doctor_app
from mesatron.errors import REPORTED, CheckpointError, ConfigError, DataError, report, unusable_path

app = typer.Typer(
    no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False, rich_markup_mode=None,
    help="Train MesaNet language models, from raw text to perplexity.",
)  # fmt: skip
config_app = typer.Typer(no_args_is_help=True, help="Look at config files.")
tokenizer_app = typer.Typer(no_args_is_help=True, help="Make tokenizers.")
data_app = typer.Typer(no_args_is_help=True, help="Turn text into shards and look at them.")
checkpoint_app = typer.Typer(no_args_is_help=True, help="Look at checkpoints.")
evaluate_app = typer.Typer(no_args_is_help=True, help="Measure trained models.")
for name, group in {
    "config": config_app, "tokenizer": tokenizer_app, "data": data_app, "checkpoint": checkpoint_app,
    "evaluate": evaluate_app, "doctor": doctor_app, "bench": bench_app,
    "launch": launch_app,
}.items():  # fmt: skip
    app.add_typer(group, name=name)

INTERRUPTED = 130

ConfigFile = Annotated[Path, typer.Argument(metavar="FILE", help="Config file of the run.")]
Overrides = Annotated[
    list[str] | None, typer.Argument(metavar="[KEY=VALUE]...", help="Overrides such as train.peak_lr=3e-3.")
]
Overwrite = Annotated[bool, typer.Option("--overwrite", help="Replace what is there.")]
RunOrCheckpoint = Annotated[Path, typer.Argument(metavar="PATH", help="Run folder or checkpoint folder.")]


def main() -> None:
    """Run a verb; a fault becomes one line on standard error and its exit code."""
    try:
        app()
    except REPORTED as error:
        report(error)
        _leave(error.exit_code)
    except (SystemExit, KeyboardInterrupt) as end:  # typer ends every verb by the first, after Ctrl-C too
        if getattr(end, "code", INTERRUPTED) != INTERRUPTED:
            raise
        if os.environ.get("RANK", "0") == "0":
            print("mesatron: interrupted; a training run goes on from its last checkpoint.", file=sys.stderr)
        _leave(INTERRUPTED)
    except OSError as error:
        if error.filename is None:
            raise
        report(unusable_path(error))
        _leave(ConfigError.exit_code)
    except Exception:
        traceback.print_exc()
        _leave(1)


def _leave(code: int) -> None:
    """Exit at once: after a fault, waiting for threads or other processes could hang."""
    leave_word(code)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


@app.command()
def train(
    file: ConfigFile,
    overrides: Overrides = None,
    processes: Annotated[
        int | None, typer.Option(min=1, help="Start so many processes on this machine; else this is one of torchrun's.")
    ] = None,
    stop_at_step: Annotated[int | None, typer.Option(min=1, help="Save and end early, with exit code 75.")] = None,
    allow_changes: Annotated[
        bool, typer.Option("--allow-changes", help="Go on although settings that alter the result changed.")
    ] = False,
) -> None:
    """Train a run, from its newest checkpoint if it has one."""
    from mesatron.config import accumulation_steps, data_parallel_size, load_config

    config = load_config(file, overrides or [])
    if processes and processes > 1:
        accumulation_steps(config, data_parallel_size(config, processes))
        from mesatron.launch import launch_local
        from mesatron.train.stop import stop_signals

        options = [f"--stop-at-step={stop_at_step}"] if stop_at_step else []
        options += ["--allow-changes"] if allow_changes else []
        _leave(launch_local(processes, ["train", str(file), *(overrides or []), *options], stop_signals(config)))
    from mesatron.train.stop import StopFlag

    stop = StopFlag(config)  # before the seconds that importing torch takes
    from mesatron.train.loop import train

    train(config, stop, stop_at_step, allow_changes)


@app.command()
def generate(
    path: RunOrCheckpoint,
    prompt: Annotated[str, typer.Option(help="Text to continue.")],
    max_new_tokens: Annotated[int, typer.Option(min=1)] = 128,
    temperature: Annotated[float, typer.Option(min=0.0, help="0 takes the likeliest token.")] = 0.0,
    top_p: Annotated[float, typer.Option(min=0.0, max=1.0, help="Draw from so much of the probability.")] = 1.0,
    seed: Annotated[int, typer.Option(min=0, max=2**63 - 1)] = 0,
    solver_steps: Annotated[int | None, typer.Option(min=1, help="Most conjugate gradient steps.")] = None,
    solver_tolerance: Annotated[float | None, typer.Option(min=0.0, help="Relative residual to stop at.")] = None,
) -> None:
    """Continue a prompt in constant memory per token."""
    import torch
    from mesatron_data.tokenizer import Tokenizer

    from mesatron.evaluate.checkpoint import load_model
    from mesatron.evaluate.generation import generate

    solver = {"solver_steps": solver_steps, "solver_tolerance": solver_tolerance}
    trained = load_model(path, {key: value for key, value in solver.items() if value is not None})
    tokenizer = Tokenizer.of_prepared(trained.config.data.folder)
    trained.check_tokenizer(tokenizer.sha256, trained.config.data.folder)
    ids = [tokenizer.bos_id, *tokenizer.encode(prompt)]
    shown = tokenizer.decode(ids)
    typer.echo(shown, nl=False)
    tokens = torch.tensor(ids, device=trained.device)
    for token in generate(trained.model, tokens, max_new_tokens, temperature, top_p, seed):
        if token == tokenizer.bos_id:  # the next document would begin
            break
        ids.append(token)
        text = tokenizer.decode(ids)
        if not text.endswith("\ufffd"):  # a character may take several byte tokens
            typer.echo(text[len(shown) :], nl=False)
            shown = text
    typer.echo(tokenizer.decode(ids)[len(shown) :])


@app.command()
def prove(
    folder: Annotated[Path, typer.Argument(metavar="FOLDER", help="A new folder for data, runs and logs.")],
    processes: Annotated[int, typer.Option(min=2, help="Largest number of processes to use.")] = 4,
    steps: Annotated[int, typer.Option(min=2, help="Optimizer steps of each run.")] = 20,
    precision: Annotated[
        Literal["fp32", "bf16"], typer.Option(help="fp32: all within 2e-5; bf16: losses within 1 %.")
    ] = "fp32",
) -> None:
    """Train a tiny model in every layout that fits, and compare each with one process."""
    from mesatron.prove.layouts import CASES
    from mesatron.prove.table import Prover, table
    from mesatron.prove.worlds import fork_server

    try:
        folder.mkdir(parents=True)
    except FileExistsError:
        raise ConfigError(f"{folder} exists; name a folder that is to be made.") from None
    fitting = [case for case in CASES if case.processes <= processes]
    _leave(0 if table(Prover(fork_server(), folder, steps, precision), fitting, typer.echo) else 1)


@app.command()
def summary(run_folder: Annotated[Path, typer.Argument(metavar="RUN", help="Run folder.")]) -> None:
    """What a run came to."""
    from mesatron.summary import summarize

    result = summarize(run_folder)

    def figure(value: float | None) -> str:
        return "not measured" if value is None else f"{value:.2f}"

    _table([
        ("steps", f"{result.step} of {result.steps}"),
        ("tokens seen", f"{result.tokens_seen:,}"),
        ("validation perplexity", f"{figure(result.first_perplexity)} untrained, {figure(result.last_perplexity)} now"),
        ("tokens per second", f"{result.tokens_per_second:,.0f} (median)"),
        ("time", result.goodput.describe() if result.goodput else "not measured"),
        ("checkpoint", str(result.checkpoint or "none")),
        ("TensorBoard", str(result.tensorboard)),
        ("to look at it", f"{Path(sys.executable).with_name('tensorboard')} --logdir {result.tensorboard}"),
    ])  # fmt: skip


@app.command()
def replay(file: Annotated[Path, typer.Argument(metavar="FILE", help="A file in nonfinite/ of a run.")]) -> None:
    """Compute a layer that gave non-finite numbers again, and show where they begin."""
    from mesatron.replay import replay

    about, readings = replay(file)
    typer.echo(", ".join(f"{key} {value}" for key, value in about.items()))
    rows = [("tensor", "shape", "not finite", "largest")]
    rows += [(x.name, " x ".join(map(str, x.shape)), str(x.not_finite), f"{x.largest:.3g}") for x in readings]
    _table(rows)


@config_app.command("check")
def config_check(
    file: ConfigFile,
    overrides: Overrides = None,
    processes: Annotated[
        int | None, typer.Option(min=1, help="Processes the run will have; else as few as its layout takes.")
    ] = None,
) -> None:
    """Print the resolved config, its parameter count, tokens per step, steps and layout."""
    from mesatron_data.manifest import MANIFEST_FILE, load_manifest
    from mesatron_data.store import is_remote

    from mesatron.config import accumulation_steps, check_prepared, data_parallel_size, dump_config, load_config

    config = load_config(file, overrides or [])
    parallel = config.parallel
    if processes is None:
        processes = parallel.model_size * (parallel.data_size or 1)
    data_size = data_parallel_size(config, processes)
    accumulation = accumulation_steps(config, data_size)
    folder = config.data.folder
    if not is_remote(folder) and Path(folder, MANIFEST_FILE).exists():
        check_prepared(config, load_manifest(folder), folder)
    typer.echo(dump_config(config), nl=False)
    train = config.train
    typer.echo(
        f"# parameters       {config.model.parameter_count():,}\n"
        f"# tokens per step  {config.tokens_per_step:,} = {train.global_batch_size} sequences x "
        f"{config.data.context_length} tokens\n"
        f"# global batch     {train.global_batch_size} = {train.micro_batch_size} micro x {accumulation} accumulation "
        f"x {data_size} data-parallel\n"
        f"# steps            {train.steps:,} = {train.steps * config.tokens_per_step:,} tokens\n"
        f"# processes        {processes} = {parallel.tensor_size} tensor x {parallel.context_size} context x "
        f"{data_size} data x {parallel.pipeline_size} pipeline"
    )


@tokenizer_app.command("train")
def tokenizer_train(file: ConfigFile, overrides: Overrides = None, overwrite: Overwrite = False) -> None:
    """Train the SentencePiece model that the config names on its raw text."""
    import resource

    from mesatron_data.tokenizer import MODEL_FILE, Tokenizer, trained_as
    from mesatron_data.tokenizer_training import tokenizer_request, train_tokenizer

    from mesatron.config import load_config

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
    trained = train_tokenizer(
        config.data.input_folder, folder, size, seed=config.train.seed,
        max_sample_bytes=config.tokenizer.sample_bytes, max_skipped_fraction=config.data.max_skipped_fraction,
        allow_truncated_files=config.data.allow_truncated_files, weights=config.data.weights,
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
    overrides: Overrides = None,
    overwrite: Overwrite = False,
    workers: Annotated[
        int | None, typer.Option(min=1, help="Processes to use; every core that this one may use by default.")
    ] = None,
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
    workers = workers or len(os.sched_getaffinity(0))
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
) -> None:
    """Sources, document lengths, token frequencies and decoded sequences of prepared shards."""
    from mesatron_data.inspect import inspect

    from mesatron.preparation import print_manifest

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
    overrides: Overrides = None,
    documents: Annotated[int, typer.Option(min=2, help="Documents to compare with each other.")] = 10_000,
    threshold: Annotated[
        float, typer.Option(min=0.1, max=1.0, help="Share of runs of words in common that counts.")
    ] = 0.8,
) -> None:
    """Documents of a sample of the raw text that are nearly the same as another of it, by source."""
    from mesatron_data.near import find_near_duplicates

    from mesatron.config import load_config

    found = find_near_duplicates(load_config(file, overrides or []).data.input_folder, documents, threshold)
    _table([
        ("source", "documents", "nearly the same as an earlier one"),
        *(
            (source, f"{number:,}", f"{found.repeated.get(source, 0):,} ({found.repeated.get(source, 0) / number:.2%})")
            for source, number in sorted(found.documents.items())
        ),
    ])  # fmt: skip
    for place, earlier, likeness in found.pairs:
        typer.echo(f"{place} is {likeness:.0%} of {earlier}")


@checkpoint_app.command("list")
def checkpoint_list(run_folder: Annotated[Path, typer.Argument(metavar="RUN", help="Run folder.")]) -> None:
    """Every checkpoint of a run and whether it is complete."""
    from mesatron.checkpoint.verify import list_checkpoints

    folder = run_folder / "checkpoints"
    if not folder.is_dir():
        raise ConfigError(f"{run_folder} is no run folder: it has no checkpoints; check the path.")
    for info in list_checkpoints(folder):
        typer.echo(f"{info.path}  {info.status}{f' ({info.reason})' if info.reason else ''}")


@checkpoint_app.command("verify")
def checkpoint_verify(path: RunOrCheckpoint) -> None:
    """Check every byte of a checkpoint, or of all of a run that were not set aside."""
    from mesatron.checkpoint.format import STEP_FOLDER
    from mesatron.checkpoint.verify import list_checkpoints, verify

    found = [path]
    if (path / "checkpoints").is_dir():
        found = [info.path for info in list_checkpoints(path / "checkpoints") if STEP_FOLDER.fullmatch(info.path.name)]
        if not found:
            raise CheckpointError(f"{path} holds no checkpoint; train first or choose another run.")
    for checkpoint in found:
        verify(checkpoint)
        typer.echo(f"{checkpoint} is sound.")


@checkpoint_app.command("inspect")
def checkpoint_inspect(path: RunOrCheckpoint) -> None:
    """State and tensors of a checkpoint."""

    from mesatron.checkpoint.reader import open_checkpoint

    reader = open_checkpoint(path)
    typer.echo(f"{reader.folder}\n{json.dumps(reader.state, indent=1)}")
    for name in sorted(reader.names("weights")):
        typer.echo(f"{name}  {list(reader.shape('weights', name))}")


@evaluate_app.command("perplexity")
def evaluate_perplexity(
    path: RunOrCheckpoint,
    data: Annotated[str | None, typer.Option(help="Prepared shards; the run's own by default.")] = None,
) -> None:
    """Perplexity on the whole validation split, overall and by source."""
    from mesatron.evaluate.checkpoint import evaluate_perplexity, load_model
    from mesatron.metrics import perplexity

    trained = load_model(path)
    result = evaluate_perplexity(trained, data)
    rows = [("source", "tokens", "loss", "perplexity")]
    for source, loss in result.loss_by_source.items():
        rows.append((source, f"{result.tokens_by_source[source]:,}", f"{loss:.4f}", f"{perplexity(loss):.2f}"))
    rows.append(("all", f"{result.tokens:,}", f"{result.loss:.4f}", f"{result.perplexity:.2f}"))
    typer.echo(trained.checkpoint.folder)
    _table(rows)


def _table(rows: Sequence[tuple[str, ...]]) -> None:
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    for row in rows:
        typer.echo("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip())
