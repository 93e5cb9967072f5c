"""metrics.jsonl, read back. Free of torch and TensorBoard, for scripts and the command line."""

from __future__ import annotations

import json
from contextlib import suppress
from pathlib import Path
from typing import Any

LONGEST_LINE_BYTES = 1 << 20


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """The lines of a metrics.jsonl that may not exist yet; a last one without its end is torn or being written."""
    text = path.read_bytes() if path.exists() else b""
    return [json.loads(line) for line in text.splitlines(keepends=True) if line.endswith(b"\n")]


def last_metrics(path: Path) -> dict[str, Any] | None:
    """The last whole line of a metrics.jsonl that may not exist yet."""
    if not path.exists():
        return None
    with path.open("rb") as file:
        file.seek(max(0, path.stat().st_size - LONGEST_LINE_BYTES))
        lines = file.read().splitlines(keepends=True)
    for line in reversed(lines):
        with suppress(ValueError):
            if line.endswith(b"\n"):
                return json.loads(line)
    return None
