"""`mesatron <verb>`: thin, and without torch until a verb needs it."""

from __future__ import annotations

import codecs
import json
import locale
import multiprocessing.util
import os
import sys
import traceback
from contextlib import suppress
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from mesatron.bench import bench_app
from mesatron.cluster.submission import ALLOW_CHANGES
from mesatron.cluster.verbs import launch_app, sbatch_options
from mesatron.cluster.words import leave_word
from mesatron.data_verbs import data_app, tokenizer_app
from mesatron.doctor import doctor_app
from mesatron.errors import REPORTED, CheckpointError, ConfigError, VariantError, foreseen, report, say
from mesatron.files import replace_file
from mesatron.synthetic.verbs import mad
from mesatron.terminal import (
    ConfigFile,
    Overrides,
    Overwrite,
    RowSeconds,
    RunFolder,
    RunOrCheckpoint,
    bars,
    open_streams,
    table,
)
from mesatron.versions import installed_version

app = typer.Typer(
    no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False, rich_markup_mode=None,
    context_settings={"help_option_names": ["-h", "--help"]},
)  # fmt: skip
config_app = typer.Typer(no_args_is_help=True, help="Look at config files.")
checkpoint_app = typer.Typer(no_args_is_help=True, help="Look at checkpoints.")
evaluate_app = typer.Typer(no_args_is_help=True, help="Measure trained models.")
for name, group in {
    "config": config_app, "tokenizer": tokenizer_app, "data": data_app, "checkpoint": checkpoint_app,
    "evaluate": evaluate_app, "doctor": doctor_app, "bench": bench_app,
    "launch": launch_app,
}.items():  # fmt: skip
    app.add_typer(group, name=name)
evaluate_app.command("mad")(mad)


INTERRUPTED = 130
UsageError: type[Exception] = typer.BadParameter.__mro__[1]  # type: ignore[assignment]
"""Typer exports this one of its exceptions only by a child."""


def main() -> None:
    """Run a verb; a fault becomes one line on standard error and its exit code."""
    open_streams()
    try:
        sys.exit(app(prog_name="mesatron", standalone_mode=False))
    except UsageError as error:
        _report_usage(error)
        _leave(ConfigError.exit_code)
    except REPORTED as error:
        report(error)
        _leave(error.exit_code)
    except (SystemExit, KeyboardInterrupt) as end:  # typer ends every verb by the first, after Ctrl-C too
        if getattr(end, "code", INTERRUPTED) != INTERRUPTED:
            raise
        if os.environ.get("RANK", "0") == "0":
            say("interrupted; a training run goes on from its last checkpoint.")
        _leave(INTERRUPTED)
    except BrokenPipeError:  # nobody reads any more, as after `| head`
        os._exit(1)
    except Exception as error:
        fault = foreseen(error)
        if fault:
            report(fault)
            _leave(fault.exit_code)
        with suppress(OSError):
            traceback.print_exc()
        _leave(1)


def _report_usage(error: Any) -> None:
    """In one line, unless no verb was given: then the message is the help."""
    message = error.format_message()
    if "\n" in message:
        with suppress(OSError):
            typer.echo(message, err=True)
    else:
        verb = error.ctx.command_path if error.ctx else "mesatron"  # the parser of options does not know it
        report(ConfigError(f"{message.rstrip('.')} (see '{verb} --help')."))


def _leave(code: int) -> None:
    """Exit at once: after a fault, waiting for threads or other processes could hang."""
    leave_word(code)
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError):  # it may be what failed
            stream.flush()
    multiprocessing.util._run_finalizers()  # type: ignore[attr-defined]  # which remove its temporary folder
    os._exit(code)


def _show_version(asked: bool) -> None:
    if asked:
        typer.echo(f"mesatron {installed_version('mesatron') or '(not installed)'}")
        raise typer.Exit


@app.callback()
def options(
    version: Annotated[bool, typer.Option("--version", is_eager=True, callback=_show_version, help="Show it.")] = False,
) -> None:
    """Train MesaNet language models, from raw text to perplexity."""
    # In both cases torch would end with words of its own.
    try:
        os.getcwd()
    except FileNotFoundError:
        raise ConfigError("The current folder has been removed; go to one that is there and start again.") from None
    if codecs.lookup(locale.getpreferredencoding(False)).name == "ascii":  # Python asks for UTF-8 unless told not to
        raise ConfigError("Text is ASCII here, in which torch cannot be read; unset PYTHONUTF8, or set LC_ALL=C.UTF-8.")


@app.command()
def train(
    file: ConfigFile,
    overrides: Overrides = None,
    processes: Annotated[
        int | None, typer.Option(min=1, help="Start so many processes on this machine; else this is one of torchrun's.")
    ] = None,
    stop_at_step: Annotated[int | None, typer.Option(min=1, help="Save and end early, with exit code 75.")] = None,
    allow_changes: Annotated[
        bool,
        typer.Option(
            "--allow-changes", envvar=ALLOW_CHANGES, help="Go on although settings that alter the result changed."
        ),
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
    data: Annotated[str | None, typer.Option(help="Shards with its tokenizer; its own by default.")] = None,
) -> None:
    """Continue a prompt, in constant memory per token unless a mixer is `transformer`."""
    import torch
    from mesatron_data.tokenizer import Tokenizer

    from mesatron.evaluate.checkpoint import load_model
    from mesatron.evaluate.generation import generate

    solver = {"solver_steps": solver_steps, "solver_tolerance": solver_tolerance}
    trained = load_model(path, {key: value for key, value in solver.items() if value is not None})
    folder = data or trained.config.data.folder
    tokenizer = Tokenizer.of_prepared(folder)
    trained.check_tokenizer(tokenizer.sha256, folder)
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
    mixer: Annotated[
        list[str] | None, typer.Option(help="Mixer of the model, mesa if left out; several make a pattern.")
    ] = None,
    core: Annotated[
        bool, typer.Option("--core", help="Only the five layouts of two processes in which mixers differ.")
    ] = False,
    layout: Annotated[
        list[str] | None, typer.Option(help="One of the table's layouts, such as 'TP2+SP, ZeRO-1'; else all.")
    ] = None,
    seconds: RowSeconds = 300.0,
) -> None:
    """Train a tiny model in every layout that fits, and compare each with one process."""
    from mesatron.config.mixers import parse_mixer

    for name in mixer or []:
        try:
            parse_mixer(name)
        except ValueError as error:
            end = "" if str(error).endswith("?") else "."
            raise ConfigError(f"--mixer {name!r} is no mixer; {error}{end}") from None
    from mesatron.prove.layouts import CASES, CORE, chosen

    cases = chosen([case for case in (CORE if core else CASES) if case.processes <= processes], layout or [])
    from mesatron.prove.table import Prover, table
    from mesatron.prove.worlds import fork_server

    try:
        folder.mkdir(parents=True)
    except FileExistsError:
        raise ConfigError(f"{folder} exists; name a folder that is to be made.") from None
    with bars() as show:

        def begin(done: int, name: str) -> None:
            show("prove", done, len(cases), name)

        def explain(text: str) -> None:
            print(text, file=sys.stderr)

        begin(0, "the data")
        prover = Prover(fork_server(), folder, steps, precision, mixer=mixer or ["mesa"], seconds=seconds)
        hold = table(prover, cases, partial(print, flush=True), explain, begin)
        begin(len(cases), "done")
    raise typer.Exit(0 if hold else 1)


@app.command()
def compare(
    file: Annotated[Path, typer.Argument(metavar="FILE", help="What to compare, such as configs/compare/cpu.yaml.")],
    overrides: Overrides = None,
    slurm: Annotated[bool, typer.Option("--slurm", help="Only submit the trainings, as an array of jobs.")] = False,
    sbatch: Annotated[
        list[str] | None, typer.Option(metavar="NAME=VALUE", help="Any option of sbatch; may be repeated.")
    ] = None,
) -> None:
    """Train and measure variants of one run, and write a table and plots; what is finished stays."""
    from mesatron.compare.runs import is_measured, run, submit_array
    from mesatron.compare.variants import load_comparison

    if sbatch and not slurm:
        raise ConfigError("--sbatch says how jobs are submitted; give --slurm too, or leave it out.")
    comparison = load_comparison(file, overrides or [])
    if slurm:
        typer.echo(f"job {submit_array(comparison, sbatch_options(sbatch))}")
        return
    failed = run(comparison, typer.echo)
    if any(is_measured(variant) for variant in comparison.variants):
        from mesatron.compare.report import write_report

        write_report(comparison, typer.echo)
    if failed:
        endings = ", ".join(f"{name} ({ending})" for name, ending in failed.items())
        raise VariantError(f"Not finished: {endings}; see above why, then start the same command again.")


@app.command()
def summary(run_folder: RunFolder) -> None:
    """What a run came to."""
    from mesatron.summary import summarize

    result = summarize(run_folder)

    def figure(value: float | None) -> str:
        return "not measured" if value is None else f"{value:.2f}"

    table([
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
    table(rows)


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


@checkpoint_app.command("list")
def checkpoint_list(run_folder: RunFolder) -> None:
    """Every checkpoint of a run and whether it is complete."""
    from mesatron.checkpoint.verify import list_checkpoints

    folder = run_folder / "checkpoints"
    if not folder.is_dir():
        if (run_folder / "attempts.jsonl").exists():
            raise ConfigError(f"{run_folder} has no checkpoints yet; train on.")
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
    json_file: Annotated[
        Path | None,
        typer.Option("--json", metavar="FILE", help="Write all figures there, by position too."),
    ] = None,
    overwrite: Overwrite = False,
) -> None:
    """Perplexity on the whole validation split, overall and by source."""
    if json_file is not None and json_file.exists() and not overwrite:
        raise ConfigError(f"{json_file} exists; name another file, or pass --overwrite to replace it.")
    if json_file is not None and not json_file.parent.is_dir():
        raise ConfigError(f"There is no folder {json_file.parent} for {json_file.name}; make it, or name another file.")
    from mesatron.evaluate.checkpoint import evaluate_perplexity, load_model
    from mesatron.metrics import perplexity

    trained = load_model(path)
    with bars() as show:
        result = evaluate_perplexity(
            trained, data, lambda done, total: show("evaluate", done, total, f"{done:,} of {total:,} batches")
        )
    rows = [("source", "tokens", "loss", "perplexity")]
    for source, loss in result.loss_by_source.items():
        rows.append((source, f"{result.tokens_by_source[source]:,}", f"{loss:.4f}", f"{perplexity(loss):.2f}"))
    rows.append(("all", f"{result.tokens:,}", f"{result.loss:.4f}", f"{result.perplexity:.2f}"))
    typer.echo(trained.checkpoint.folder)
    table(rows)
    if json_file is not None:
        figures = {"checkpoint": str(trained.checkpoint.folder), "perplexity": result.perplexity} | asdict(result)
        replace_file(json_file, [json.dumps(figures).encode() + b"\n"])
