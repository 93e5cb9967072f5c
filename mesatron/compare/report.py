"""The table of a comparison as Markdown and CSV; plots and TensorBoard files beside it."""

from __future__ import annotations

import csv
import io
from collections.abc import Callable, Sequence
from typing import Any

from mesatron.compare.board import write_board
from mesatron.compare.plots import PLOTS, png
from mesatron.compare.results import Result, read_results
from mesatron.compare.variants import Comparison
from mesatron.files import replace_file
from mesatron.terminal import markdown_table

MARKDOWN, CSV, BOARD = "results.md", "results.csv", "tensorboard"
NOTHING = "–"


def write_report(comparison: Comparison, say: Callable[[str], None]) -> None:
    """Write everything anew from the variants measured so far; without the reference there are no differences."""
    results = read_results(comparison)
    reference = next((result for result in results if result.name == comparison.reference), None)
    folder = comparison.output
    replace_file(folder / CSV, [_csv(results, reference).encode()])
    drawn = []
    for name, plot in PLOTS.items():
        figure, path = plot(results, reference), folder / f"{name}.png"
        if figure is None:
            path.unlink(missing_ok=True)
        else:
            replace_file(path, [png(figure)])
            drawn.append(path.name)
    write_board(folder / BOARD, [variant.name for variant in comparison.variants], results, reference)
    text = _markdown(comparison, results, reference, drawn)
    replace_file(folder / MARKDOWN, [text.encode()])
    say(text)
    say(f"Written to {folder}: {', '.join([MARKDOWN, CSV, *drawn, BOARD])}.")


def _markdown(comparison: Comparison, results: Sequence[Result], reference: Result | None, plots: Sequence[str]) -> str:
    config = comparison.variants[0].config
    places = dict.fromkeys(_place(result.environment) for result in results)
    lines = [
        f"# {comparison.name}", "",
        f"{results[0].tokens_trained:,} tokens of {config.data.folder} in steps of {config.tokens_per_step:,}, context "
        f"{config.data.context_length}, seed {config.train.seed}; {'; '.join(places)}. Perplexity on "
        f"{sum(results[0].tokens_by_position):,} held-out tokens.",
    ]  # fmt: skip
    if reference is not None:
        lines.append(
            f"Loss at the beginning and at the end: nats per token less those of {reference.name}, in the first and "
            "the last quarter of a sequence; negative is better."
        )
    if any(result.paper_perplexity is not None for result in results):
        lines.append("Paper: arXiv 2506.05233, table 10, SlimPajama.")
    lines += ["", *markdown_table(_overview(results, reference)), "", "Loss by source, nats per token:", ""]
    lines += markdown_table(_by_source(results))
    for plot in plots:
        lines += ["", f"![{plot.partition('.')[0]}]({plot})"]
    return "\n".join(lines) + "\n"


def _place(environment: dict[str, Any]) -> str:
    device = environment["gpus"][0] if environment["gpus"] else environment["device"]
    return f"{environment['world_size']} x {device}, torch {environment['packages']['torch']}"


def _overview(results: Sequence[Result], reference: Result | None) -> list[list[str]]:
    with_paper = any(result.paper_perplexity is not None for result in results)
    headings = ["variant", "parameters", "perplexity", *(["paper"] if with_paper else []), "loss"]
    headings += ["at the beginning", "at the end", "tokens/s", "peak memory, GiB"]
    rows = [headings]
    for result in results:
        row = [result.name, f"{result.parameters:,}", f"{result.perplexity:.2f}"]
        row += [_number(result.paper_perplexity, ".2f")] if with_paper else []
        row += [f"{result.loss:.4f}", *(_number(value, "+.4f") for value in _begin_and_end(result, reference))]
        rows.append([*row, f"{result.tokens_per_second:,.0f}", f"{result.peak_bytes / 2**30:.2f}"])
    return rows


def _by_source(results: Sequence[Result]) -> list[list[str]]:
    sources = list(results[0].loss_by_source)
    rows = [["variant", *sources]]
    return rows + [[result.name, *(f"{result.loss_by_source[name]:.4f}" for name in sources)] for result in results]


def _csv(results: Sequence[Result], reference: Result | None) -> str:
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    sources = list(results[0].loss_by_source)
    writer.writerow([
        "variant", "mixer", "parameters", "tokens_trained", "loss", "perplexity", "paper_perplexity",
        "difference_first_quarter", "difference_last_quarter", "tokens_per_second", "peak_memory_bytes",
        *(f"loss/{name}" for name in sources),
    ])  # fmt: skip
    for result in results:
        writer.writerow([
            result.name, result.mixer, result.parameters, result.tokens_trained, result.loss, result.perplexity,
            result.paper_perplexity, *_begin_and_end(result, reference), result.tokens_per_second,
            round(result.peak_bytes), *(result.loss_by_source[name] for name in sources),
        ])  # fmt: skip
    return text.getvalue()


def _begin_and_end(result: Result, reference: Result | None) -> tuple[float | None, float | None]:
    if reference is None:
        return None, None
    length = len(result.loss_by_position)
    quarter = max(1, length // 4)
    return result.mean_difference(reference, 0, quarter), result.mean_difference(reference, length - quarter, length)


def _number(value: float | None, form: str) -> str:
    return NOTHING if value is None else format(value, form)
