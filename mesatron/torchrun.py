"""torchrun as the launchers start it: with its options, but with the exit code of the worker that failed first.

    python3 -m mesatron.torchrun --nnodes=2 --nproc-per-node=8 ... -m mesatron train CONFIG

torchrun itself answers 1, and adds pages to the one line in which a worker has said why it ends.
"""

from __future__ import annotations

import logging
import sys

from torch.distributed import run

from mesatron.launch import exit_code

ELASTIC = "torch.distributed.elastic"
LOGGERS = (f"{ELASTIC}.multiprocessing.api", f"{ELASTIC}.rendezvous.dynamic_rendezvous")
NO_NEWS = ("failed (exitcode", "Sending process", "has failed to shutdown the rendezvous")
"""Parts of messages: of workers that have spoken for themselves, and of an agent that takes leave of the first node's
when that has gone before."""


def main() -> None:
    """Run torchrun; what goes wrong with itself, such as a rendezvous, it says as ever."""
    for name in LOGGERS:
        logging.getLogger(name).addFilter(_is_news)
    sys.exit(exit_code(lambda: run.run(run.parse_args(None))))


def _is_news(record: logging.LogRecord) -> bool:
    return not any(part in str(record.msg) for part in NO_NEWS)


if __name__ == "__main__":
    main()
