"""Last words: each process that fails says with which code, so that the ones who could not are noticed."""

from __future__ import annotations

import json
import os
import shutil
import socket
from collections import Counter
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

FOLDER = "MESATRON_LAST_WORDS"
"""Environment variable: where this process leaves its last word, or nothing."""


def node_name() -> str:
    """The name by which Slurm knows this node, or its host name."""
    return os.environ.get("SLURMD_NODENAME") or socket.gethostname()


def leave_word(code: int) -> None:
    """Note this process's exit code for the job that started it; silent where nobody asked."""
    folder = os.environ.get(FOLDER)
    if folder:
        word = json.dumps({"node": node_name(), "code": code})
        with suppress(OSError):  # the folder may be gone already, the disk full
            (Path(folder) / f"rank-{os.environ.get('RANK', '0')}.json").write_text(word)


@dataclass(frozen=True)
class LastWords:
    """The exit codes of the processes that said one, by node."""

    codes: dict[str, list[int]]

    @classmethod
    def read(cls, folder: Path) -> LastWords:
        """Those in `folder`; a word cut short by a kill is none."""
        codes: dict[str, list[int]] = {}
        for path in sorted(folder.glob("rank-*.json")):
            with suppress(ValueError, KeyError):
                word = json.loads(path.read_text())
                codes.setdefault(str(word["node"]), []).append(int(word["code"]))
        return cls(codes)

    def silent(self, nodes: list[str], processes: int) -> list[str]:
        """The nodes with a process that ended without a word, if all processes of some other node did say one.

        Where a rank, its torchrun or its node is killed, the others see it and say so. Where all are silent, the job
        was ended as a whole and no node is to blame.
        """
        said = Counter({node: len(codes) for node, codes in self.codes.items()})
        silent = [node for node in nodes if said[node] < processes]
        return silent if len(silent) < len(nodes) else []

    def cause(self, consequence: int) -> int | None:
        """A code that any process gave other than `consequence`, or None."""
        return next((code for codes in self.codes.values() for code in codes if code != consequence), None)


def forget(folder: Path) -> None:
    """Remove the words, once they are accounted for."""
    shutil.rmtree(folder, ignore_errors=True)
