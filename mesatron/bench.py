"""`mesatron bench`: the Mesa operator beside its peers, and layouts of a training, as a table and as JSON."""

from __future__ import annotations

import datetime
import json
import sys
import tempfile
from collections.abc import Iterable, Sequence
from dataclasses import asdict
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from mesatron.errors import ConfigError
from mesatron.terminal import ConfigFile, Overrides, RowSeconds, bars

if TYPE_CHECKING:
    import torch
    from mesatron_kernels.bench import Clock

bench_app = typer.Typer(no_args_is_help=True, help="Measure speed here: of the Mesa operator, of layouts.")


class Keys(StrEnum):
    """`mesatron_kernels.accuracy.Keys`, without torch."""

    silu = "silu"
    lowrank = "lowrank"
    identical = "identical"
    normal = "normal"


class Dtype(StrEnum):
    """Short names of torch's, see DTYPES."""

    bf16 = "bf16"
    fp16 = "fp16"
    fp32 = "fp32"


Heads = Annotated[int, typer.Option(min=1)]
HeadSize = Annotated[int, typer.Option(min=1)]
DtypeOption = Annotated[Dtype, typer.Option(help="Of q, k and v; the rest is fp32.")]
Inputs = Annotated[Keys, typer.Option(help="Keys; lowrank ones move slowly, identical ones not at all.")]
Gamma = Annotated[float | None, typer.Option(min=0.0, max=1.0, help="Of every token; else sigmoid(normal + 4).")]
Lambda = Annotated[float, typer.Option("--lambda", min=1e-6)]
JsonFile = Annotated[Path | None, typer.Option("--json", metavar="FILE", help="Write all figures there too.")]
Peers = Annotated[bool, typer.Option("--peers/--no-peers", help="Also fla-core, if installed, and SDPA for sequences.")]
WithTorch = Annotated[bool, typer.Option("--torch", help="Also the torch implementation; on a CPU it is always there.")]

DTYPES = {Dtype.bf16: "bfloat16", Dtype.fp16: "float16", Dtype.fp32: "float32"}
ERRORS = {"o": "o", "dq": "dq", "dk": "dk", "dv": "dv", "dlog_gamma": "dγ", "dbeta": "dβ", "dlam": "dλ"}
"""Names of errors and their headings."""
MINIMUM_WIDTH = 120
"""Columns of a table: a narrower terminal would have figures cut off, so its lines are left to break."""


@bench_app.command("mesa")
def mesa(
    batch: Annotated[int, typer.Option(min=1)] = 8,
    length: Annotated[int, typer.Option(min=1, help="Tokens of a sequence.")] = 2048,
    heads: Heads = 16,
    head_size: HeadSize = 128,
    dtype: DtypeOption = Dtype.bf16,
    steps: Annotated[int, typer.Option(min=1, help="Solver steps at most; fla-core takes as many always.")] = 30,
    tolerance: Annotated[float, typer.Option(min=0.0, help="Relative residual to stop at; 0 takes all steps.")] = 1e-4,
    inputs: Inputs = Keys.silu,
    gamma: Gamma = None,
    lam: Lambda = 1.0,
    documents: Annotated[int, typer.Option(min=0, help="Pack all tokens as so many documents into one row.")] = 0,
    cotangent_scale: Annotated[float, typer.Option(help="Size of the incoming gradient.")] = 1.0,
    peers: Peers = True,
    torch_too: WithTorch = False,
    json_file: JsonFile = None,
) -> None:
    """Forward, backward, memory, and errors of the output and every gradient against float64."""
    from mesatron_kernels import bench

    if documents > batch * length:
        raise ConfigError(f"--documents is {documents}, more than the {batch * length} tokens; lower it.")
    clock = _clock()
    setting = bench.Setting(
        batch, length, heads, head_size, DTYPES[dtype], steps, tolerance, inputs.value, gamma, lam, documents,
        cotangent_scale,
    )  # fmt: skip
    contenders = [bench.ours(name) for name in _implementations(clock, torch_too)]
    if peers and clock.on_gpu:
        contenders += [bench.fla_core()] if _has_fla() else []
    if peers:
        contenders.append(bench.sdpa())
    rates = _rates(clock)
    rows = list(bench.bench_sequence(contenders, setting, clock))
    cells = [
        [row.name, *_figures(".2f", row.forward_ms, row.total_ms), *_figures(".0f", row.peak_mib)]
        + [_short(row.errors.get(name)) for name in ERRORS]
        for row in rows
    ]
    title = f"{batch} x {length} x {heads} x {head_size} {dtype}, {inputs.value} keys; ms, MiB, errors against float64"
    _print_table(title, ["", "forward", "fwd+bwd", "MiB", *ERRORS.values()], cells)
    _finish(clock, setting, rates, rows, json_file)


@bench_app.command("decode")
def decode(
    batch: Annotated[list[int], typer.Option(min=1, help="Sequences at once; may be given several times.")] = [  # noqa: B006
        1, 16, 256,
    ],
    heads: Heads = 16,
    head_size: HeadSize = 128,
    dtype: DtypeOption = Dtype.bf16,
    inputs: Inputs = Keys.silu,
    gamma: Gamma = None,
    lam: Lambda = 1.0,
    peers: Peers = True,
    torch_too: WithTorch = False,
    json_file: JsonFile = None,
) -> None:  # fmt: skip
    """One token of many sequences: bytes of both states per second, against a plain copy's."""
    from mesatron_kernels import bench

    clock = _clock()
    names = _implementations(clock, torch_too)
    names += ["fla-core"] if peers and clock.on_gpu and _has_fla() else []
    rates = _rates(clock)
    settings = [
        bench.Setting(size, 1, heads, head_size, DTYPES[dtype], 30, 0.0, inputs.value, gamma, lam) for size in batch
    ]
    rows = [row for setting in settings for row in bench.bench_decode(names, setting, clock)]
    cells = []
    for row in rows:
        share = None if row.tb_per_second is None else 1e5 * row.tb_per_second / rates["copy_gb_per_second"]
        cells.append([
            str(row.batch), row.name, row.solver, *_figures(".3f", row.milliseconds, row.tb_per_second),
            *_figures(".0f", share), _short(row.error),
        ])  # fmt: skip
    title = f"one token, {heads} heads of {head_size}, {dtype}, {inputs.value} keys"
    _print_table(title, ["batch", "", "solver", "ms", "TB/s", "% of copy", "error of o"], cells)
    _finish(clock, settings[0], rates, rows, json_file)


@bench_app.command("layouts")
def layouts(
    file: ConfigFile,
    overrides: Overrides = None,
    processes: Annotated[int, typer.Option(min=1, help="Processes, one on each GPU of this machine.")] = 1,
    layout: Annotated[
        list[str] | None, typer.Option(help="One of the table's layouts, such as 'TP2+SP, ZeRO-1'; else all.")
    ] = None,
    micro_batch: Annotated[
        list[int] | None, typer.Option(min=1, help="Sequences of a micro-batch; several are tried in turn.")
    ] = None,
    steps: Annotated[int, typer.Option(min=1, help="Steps that are timed in each.")] = 8,
    seconds: RowSeconds = 300.0,
    json_file: JsonFile = None,
) -> None:
    """Tokens/s, memory and communication of a config in every layout, on random text."""
    from mesatron.prove import speed
    from mesatron.prove.layouts import chosen
    from mesatron.prove.worlds import WorldFailed, fork_server

    cases = chosen(speed.layouts(processes), layout or [])
    rows: list[speed.Speed] = []
    about = {"file": str(file), "overrides": overrides or [], "processes": processes, "steps": steps}
    number = len(cases) * max(1, len(micro_batch or []))
    with tempfile.TemporaryDirectory(prefix="mesatron-bench-") as folder, bars() as show:
        show("bench", 0, number, f"0 of {number}")
        context = fork_server()
        for row in speed.measure(
            context, Path(folder) / "new", file, overrides or [], cases, micro_batch or [], steps, seconds
        ):
            rows.append(row)
            show("bench", len(rows), number, f"{len(rows)} of {number}")
            if json_file:  # now, as a later one may run into a time limit
                _write(json_file, _device(), rows, setting=about)
            rate = "" if row.tokens_per_second is None else f"{row.tokens_per_second:,.0f} tokens/s"
            print(f"{row.layout}, micro-batch {row.micro_batch}: {row.failure or rate}", file=sys.stderr, flush=True)
    cells = []
    for row in rows:
        if row.tokens_per_second is not None and row.peak_bytes is not None:
            rates = _figures(",.0f", row.tokens_per_second, row.tokens_per_second / processes)
            shares = _figures(".1%", row.computing, row.communicating, row.only_communicating)
            memory = _figures(".1f", row.peak_bytes / 2**30)
            profiled = _figures(".3f", row.profiled_seconds)
            cells.append([row.layout, str(row.micro_batch), *rates, *memory, *profiled, *shares])
    headings = ["layout", "micro-batch", "tokens/s", "per process", "GiB", "profiled s"]
    headings += ["computing", "communicating", "nothing else"]
    if not cells:
        raise WorldFailed("No layout trained; the lines above say why.")
    title = f"{file}, {processes} processes; to wait for others is to communicate; GiB of the largest process"
    _print_table(title, headings, cells)


def _device() -> torch.device:
    import torch

    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


def _clock() -> Clock:
    from mesatron_kernels.bench import Clock

    return Clock(_device())


def _implementations(clock: Clock, torch_too: bool) -> list[str]:
    return (["triton"] if clock.on_gpu else []) + (["torch"] if torch_too or not clock.on_gpu else [])


def _has_fla() -> bool:
    import importlib.util

    if importlib.util.find_spec("fla") is None:
        typer.echo("fla-core is not installed, so it is left out (pip install fla-core).", err=True)
        return False
    typer.echo("fla-core compiles and tries out its kernels first, which can take minutes.", err=True)
    return True


def _rates(clock: Clock) -> dict[str, float]:
    return {"copy_gb_per_second": clock.copy_gb_per_second(), "matmul_bf16_tflops": clock.matmul_tflops()}


def _figures(form: str, *values: float | None) -> list[str]:
    return ["" if value is None else format(value, form) for value in values]


def _short(error: float | None) -> str:
    """1.7e-3"""
    return "" if error is None else f"{error:.1e}".replace("e-0", "e-").replace("e+0", "e+")


def _print_table(title: str, headings: Sequence[str], rows: Iterable[Sequence[str]]) -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table(title=title, title_justify="left", box=None, padding=(0, 1, 0, 0))
    for number, heading in enumerate(headings):
        table.add_column(heading, justify="left" if number == 0 else "right", no_wrap=True)
    for row in rows:
        table.add_row(*row)
    Console(width=max(Console().width, MINIMUM_WIDTH)).print(table)


def _finish(clock: Clock, setting: Any, rates: dict[str, float], rows: Sequence[Any], json_file: Path | None) -> None:
    """Failures, rates and versions under the table; everything to the file."""
    from mesatron_kernels.bench import describe

    machine = describe(clock.device)
    for row in rows:
        if row.failure:
            typer.echo(f"{row.name} failed: {row.failure}")
    typer.echo(f"copy {rates['copy_gb_per_second']:,.0f} GB/s, bf16 matmul {rates['matmul_bf16_tflops']:,.1f} TFLOP/s")
    typer.echo("  ".join(f"{name} {value}" for name, value in machine.items()))
    if json_file:
        _write(json_file, clock.device, rows, setting=asdict(setting), rates=rates)


def _write(file: Path, device: torch.device, rows: Sequence[Any], **about: Any) -> None:
    from mesatron_kernels.bench import describe

    moment = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
    figures = {"time": moment, "machine": describe(device), **about, "rows": [asdict(row) for row in rows]}
    file.write_text(json.dumps(figures, indent=1) + "\n")
