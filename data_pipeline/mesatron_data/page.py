"""What `inspect` found, as one HTML page that needs nothing else: plots are SVG, text is escaped."""

import math
from collections.abc import Sequence
from html import escape

from mesatron_data.inspect import Inspection, Piece

WIDTH, HEIGHT = 640, 200
COLOURS = ("#4e79a7", "#f28e2b", "#59a14f", "#e15759", "#b07aa1", "#9c755f", "#edc948", "#76b7b2")
STYLE = (
    "body{font:15px/1.5 system-ui,sans-serif;max-width:70em;margin:2em auto;padding:0 1em}"
    "table{border-collapse:collapse}td{padding:.1em .8em;text-align:right}td:first-child{text-align:left}"
    "svg{display:block;margin:.5em 0}text{font-size:11px}"
    "pre{white-space:pre-wrap;border:1px solid #bbb;padding:.8em}"
    "mark{display:block;color:#fff;padding:0 .5em;margin:.4em 0 .2em}"
)
# Characters that a page cannot show: control characters get their own signs.
SIGNS = {code: 0x2400 + code for code in range(32) if chr(code) not in "\t\n"} | {127: 0x2421}


def page(folder: str, found: Inspection) -> str:
    """Return the page of a prepared folder."""
    manifest = found.manifest
    facts = (
        f"sequences of {manifest.context_length} tokens, vocabulary {manifest.vocabulary_size:,}, packing "
        f"{manifest.packing}, fingerprint {manifest.fingerprint[:12]}"
    )
    parts = [f"<h1>{_text(folder)}</h1><p>{_text(facts)}</p>"]
    for split, counts in manifest.splits.items():
        inputs = max(counts.samples * manifest.context_length, 1)
        parts.append(f"<h2>{_text(split)}</h2>")
        parts.append(
            _table([
                ("sequences", f"{counts.samples:,}"), ("documents", f"{counts.documents:,}"),
                ("tokens", f"{counts.tokens:,}"),
                ("tokens at the end in no sequence", f"{counts.dropped_tail_tokens:,}"),
                ("padding", f"{counts.padding_tokens / inputs:.2%}"),
                ("cuts a document", f"{counts.cuts / max(counts.documents, 1):.2f}"),
                ("documents whose text came before", f"{counts.duplicates:,}"),
                *((f"left out, {reason}", f"{number:,}") for reason, number in counts.removed.items()),
                *((f"records skipped, {reason}", f"{number:,}") for reason, number in counts.skipped.items()),
                *((f"changed, {reason}", f"{number:,}") for reason, number in counts.normalised.items()),
            ])
        )  # fmt: skip
        sources = {name: source.tokens / max(counts.tokens, 1) for name, source in counts.sources.items()}
        parts.append("<h3>share of tokens by source</h3>" + _bars([(n, s, f"{s:.1%}") for n, s in sources.items()]))
        lengths = [(f"≤{length:,}", float(n), f"{n:,}") for length, n in counts.document_lengths.items()]
        parts.append("<h3>documents by length in tokens</h3>" + _bars(lengths))
    total = sum(found.token_counts)
    parts.append(
        f"<h2>tokens</h2><p>{found.unused_tokens:,} entries of the vocabulary do not occur; "
        f"{found.ignored_targets:.2%} of targets are BOS and have no loss.</p><h3>share of a token by its rank</h3>"
        + _line([count / total for count in found.token_counts])
        + "<h3>most frequent</h3>"
        + _bars([(piece, share, f"{share:.2%}") for piece, share in found.frequent_tokens])
        + "<h3>sequences by documents or parts of them</h3>"
        + _bars([(f"{number:,}", float(count), f"{count:,}") for number, count in found.pieces.items()])
    )
    names = {name: COLOURS[number % len(COLOURS)] for number, name in enumerate(manifest.sources)}
    for number, sample in enumerate(found.samples):
        parts.append(f"<h2>sequence {number}</h2><pre>{''.join(_piece(piece, names) for piece in sample)}</pre>")
    return (
        f'<!DOCTYPE html><html lang="en"><head><meta charset="utf-8"><title>{_text(folder)}</title>'
        f"<style>{STYLE}</style></head><body>{''.join(parts)}</body></html>\n"
    )


def _text(text: str) -> str:
    return escape(text.translate(SIGNS).replace("\r", "␍"))


def _piece(piece: Piece, colours: dict[str, str]) -> str:
    what = "document begins" if piece.begins else "continued"
    return f'<mark style="background:{colours[piece.source]}">{_text(piece.source)}, {what}</mark>{_text(piece.text)}'


def _table(rows: Sequence[tuple[str, str]]) -> str:
    return (
        f"<table>{''.join(f'<tr><td>{_text(name)}</td><td>{_text(value)}</td></tr>' for name, value in rows)}</table>"
    )


def _bars(rows: Sequence[tuple[str, float, str]]) -> str:
    """A bar for each row of name, value and how the value is written."""
    largest = max((value for _, value, _ in rows), default=0.0) or 1.0
    drawn = "".join(
        f'<text x="150" y="{18 * number + 13}" text-anchor="end">{_text(name)}</text>'
        f'<rect x="156" y="{18 * number + 3}" width="{400 * value / largest:.1f}" height="13" fill="{COLOURS[0]}"/>'
        f'<text x="{162 + 400 * value / largest:.1f}" y="{18 * number + 13}">{_text(label)}</text>'
        for number, (name, value, label) in enumerate(rows)
    )
    return f'<svg width="{WIDTH}" height="{18 * len(rows) + 6}">{drawn}</svg>'


def _line(values: Sequence[float]) -> str:
    """Falling values over their rank, both in powers of ten."""
    if not values:
        return ""
    right, bottom = math.log10(len(values)) or 1.0, math.log10(values[-1])
    height = (math.log10(values[0]) - bottom) or 1.0

    def place(rank: int) -> str:
        x = 50 + (WIDTH - 60) * math.log10(rank) / right
        y = 10 + (HEIGHT - 30) * (1 - (math.log10(values[rank - 1]) - bottom) / height)
        return f"{x:.1f},{y:.1f}"

    ranks = sorted({min(len(values), round(10 ** (step * right / 100))) for step in range(101)} | {1, len(values)})
    return (
        f'<svg width="{WIDTH}" height="{HEIGHT}"><polyline fill="none" stroke="{COLOURS[0]}" stroke-width="2" '
        f'points="{" ".join(map(place, ranks))}"/><text x="0" y="14">{values[0]:.1e}</text>'
        f'<text x="0" y="{HEIGHT - 20}">{values[-1]:.1e}</text><text x="50" y="{HEIGHT - 5}">1</text>'
        f'<text x="{WIDTH - 60}" y="{HEIGHT - 5}">rank {len(values):,}</text></svg>'
    )
