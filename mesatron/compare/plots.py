"""Plots of a comparison."""

from __future__ import annotations

import io
import itertools
from collections.abc import Callable, Sequence

from matplotlib import colormaps
from matplotlib.figure import Figure

from mesatron.compare.results import Result

DOTS_PER_INCH = 120
POSITION_BINS_PER_DOUBLING = 4
"""Single positions are noisy: a plot shows means over intervals that grow with the position."""
Plot = Callable[[Sequence[Result], Result | None], Figure | None]


def curves(results: Sequence[Result], reference: Result | None) -> Figure:
    """Training loss, as logged, and validation loss against tokens trained on."""
    figure = Figure(figsize=(13, 5), layout="constrained")
    training, validation = figure.subplots(1, 2)
    for colour, result in zip(_colours(results), results, strict=True):
        tokens_per_step = result.tokens_trained / result.train_loss[-1][0]
        for axes, curve, mark in ((training, result.train_loss, "-"), (validation, result.validation_loss, ".-")):
            tokens = [step * tokens_per_step for step, _ in curve]
            axes.plot(tokens, [loss for _, loss in curve], mark, color=colour, label=result.name)
    training.set(xlabel="tokens", ylabel="training loss, nats per token", xscale="log")
    validation.set(xlabel="tokens", ylabel="validation loss, nats per token")
    return _finished(figure)


def positions(results: Sequence[Result], reference: Result | None) -> Figure | None:
    """Loss by token position less that of the reference; nothing without one or without another variant."""
    if reference is None or len(results) == 1:
        return None
    figure = Figure(figsize=(8, 5), layout="constrained")
    axes = figure.subplots()
    axes.axhline(0, color="black", linewidth=0.8)
    bounds = position_bounds(len(reference.loss_by_position))
    for colour, result in zip(_colours(results), results, strict=True):
        if result is reference:
            continue
        bins = [
            ((begin + end + 1) / 2, result.mean_difference(reference, begin, end))
            for begin, end in itertools.pairwise(bounds)
        ]
        shown = [(middle, value) for middle, value in bins if value is not None]
        axes.plot(*zip(*shown, strict=True), color=colour, marker=".", label=result.name)
    axes.set(xscale="log", xlabel="token position", ylabel=f"loss less that of {reference.name}, nats")
    return _finished(figure)


def speed(results: Sequence[Result], reference: Result | None) -> Figure:
    """Perplexity against training speed."""
    figure = Figure(figsize=(8, 5), layout="constrained")
    axes = figure.subplots()
    for colour, result in zip(_colours(results), results, strict=True):
        axes.plot(result.tokens_per_second, result.perplexity, "o", color=colour, label=result.name)
    axes.set(xlabel="tokens per second in training", ylabel="validation perplexity", xscale="log")
    return _finished(figure)


PLOTS: dict[str, Plot] = {"curves": curves, "positions": positions, "speed": speed}
"""By their names."""


def png(figure: Figure) -> bytes:
    """The figure as an image file."""
    image = io.BytesIO()
    figure.savefig(image, format="png", dpi=DOTS_PER_INCH)
    return image.getvalue()


def position_bounds(length: int) -> list[int]:
    """Where the intervals of positions begin, and the end of the last: each a quarter of a doubling, or one token."""
    steps = range(POSITION_BINS_PER_DOUBLING * length.bit_length())
    bounds = {min(length, round(2 ** (step / POSITION_BINS_PER_DOUBLING))) for step in steps}
    return sorted({0, length, *bounds})


def _colours(results: Sequence[Result]) -> list[tuple[float, ...]]:
    return [colormaps["tab20"](number % 20) for number in range(len(results))]


def _finished(figure: Figure) -> Figure:
    for axes in figure.axes:
        axes.grid(alpha=0.3)
    # Beside the axes: a dozen names inside would cover curves.
    figure.legend(*figure.axes[-1].get_legend_handles_labels(), loc="outside right upper", fontsize="small")
    return figure
