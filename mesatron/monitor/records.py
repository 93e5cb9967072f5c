"""Cut monitoring files back to the step that a run resumes from, so that no point is ever there twice.

A run killed at step 150 that resumes from the checkpoint of step 100 writes steps 101 to 150 again. What the dead
attempt wrote of them is removed from the files themselves, so any reader sees one point per tag and step.
Each file is replaced in one step: a kill at any moment leaves the old file or the new one, and the next start ends it.
"""

import json
from collections.abc import Iterator
from pathlib import Path

from google.protobuf.message import DecodeError
from tensorboard.backend.event_processing.event_file_loader import RawEventFileLoader
from tensorboard.compat.proto.event_pb2 import Event

from mesatron.files import replace_file

# TFRecord framing: 8 bytes length and 4 bytes checksum before each record, 4 bytes checksum after it.
_FRAME_BYTES = 8 + 4, 4


def cut_metrics(path: Path, last_step: int) -> None:
    """Remove the lines of steps after `last_step`, and torn lines, from a metrics.jsonl that may not exist yet."""
    _keep_pieces(path, _metric_lines(path), last_step)


def cut_events(path: Path, last_step: int) -> None:
    """Remove the events of steps after `last_step`, and a torn end, from a TensorBoard event file.

    The file keeps its version record, which carries no step.
    """
    _keep_pieces(path, _event_records(path), last_step)


def _keep_pieces(path: Path, pieces: Iterator[tuple[int, int, int]], last_step: int) -> None:
    """Rewrite a file with only its sound pieces, each given as (start, stop, step), of steps up to `last_step`."""
    if not path.exists():
        return
    content = path.read_bytes()
    kept = [content[start:stop] for start, stop, step in pieces if step <= last_step]
    if sum(map(len, kept)) < len(content):
        replace_file(path, kept)


def _metric_lines(path: Path) -> Iterator[tuple[int, int, int]]:
    stop = 0
    with path.open("rb") as file:
        for line in file:
            start, stop = stop, stop + len(line)
            try:
                step = json.loads(line)["step"]
            except (ValueError, TypeError, KeyError):
                continue
            # Without its end the line is torn, even where what is left of it happens to parse.
            if line.endswith(b"\n"):
                yield start, stop, step


def _event_records(path: Path) -> Iterator[tuple[int, int, int]]:
    stop = 0
    for record in RawEventFileLoader(str(path)).Load():
        start, stop = stop, stop + sum(_FRAME_BYTES) + len(record)
        try:
            event = Event.FromString(record)
        except DecodeError:
            continue
        yield start, stop, -1 if event.HasField("file_version") else event.step
