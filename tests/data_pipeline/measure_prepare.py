"""Speed of `mesatron data prepare` on one core against SentencePiece's bare encoder on the same text, by turns.

    python tests/data_pipeline/measure_prepare.py INPUT_FOLDER TOKENIZER [--rounds 3] [--context-length 2048]

The encoder gets the texts as Python strings that are in memory already and its ids are thrown away. Preparation reads
and unpacks the records, tokenizes, packs, compresses, hashes and flushes everything to the disk. CPU seconds are those
of this process with its threads, which other load on the machine disturbs less than time on the clock.
"""

import argparse
import os
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import sentencepiece
from mesatron_data.mosaic import streaming  # noqa: F401  (imported before the clock starts)
from mesatron_data.records import SPLITS, Counts, list_files, read_documents
from mesatron_data.shards import prepare

TEXTS_AT_A_TIME = 256


def seconds(work: Callable[[], object]) -> tuple[float, float]:
    """CPU time and time on the clock of one call."""
    cpu, clock = time.process_time(), time.perf_counter()
    work()
    return time.process_time() - cpu, time.perf_counter() - clock


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("input_folder")
    parser.add_argument("tokenizer", type=Path)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--context-length", type=int, default=2048)
    arguments = parser.parse_args()
    os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})

    encoder = sentencepiece.SentencePieceProcessor(model_file=str(arguments.tokenizer / "tokenizer.model"))
    texts = [
        document.text
        for split in SPLITS
        for file in list_files(arguments.input_folder, split)
        for document in read_documents(file, Counts())
    ]
    megabytes = sum(len(text.encode()) for text in texts) / 1e6

    def encode() -> None:
        for begin in range(0, len(texts), TEXTS_AT_A_TIME):
            encoder.encode(texts[begin : begin + TEXTS_AT_A_TIME], num_threads=1)

    def whole() -> None:
        with tempfile.TemporaryDirectory() as folder:
            made = prepare(arguments.input_folder, f"{folder}/out", arguments.tokenizer, arguments.context_length)
            tokens.append(sum(split.tokens for split in made.manifest.splits.values()))

    tokens: list[int] = []
    ratios = []
    for _ in range(arguments.rounds):
        (bare, bare_clock), (full, full_clock) = seconds(encode), seconds(whole)
        ratios.append(bare / full)
        print(
            f"encoder {tokens[-1] / bare:,.0f} tokens/s ({bare:.2f} s CPU, {bare_clock:.2f} s), prepare "
            f"{tokens[-1] / full:,.0f} tokens/s ({full:.2f} s CPU, {full_clock:.2f} s), ratio {bare / full:.3f}"
        )
    print(f"{megabytes:.1f} MB, {tokens[-1]:,} tokens, median ratio {statistics.median(ratios):.3f}")


if __name__ == "__main__":
    main()
