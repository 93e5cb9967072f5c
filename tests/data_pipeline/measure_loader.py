"""Speed of the loader alone: training batches of prepared data read as fast as they come, in one process.

    python tests/data_pipeline/measure_loader.py FOLDER [--workers 2] [--sequences 64] [--seconds 20]

Figures: tokens a second on the clock and for a second of CPU time (all threads), share of one core that reading takes
at the rate of training, and bytes of packed shards. The first pass unpacks and checks every shard that it comes to; the
second checks those that it finds unpacked.
"""

import argparse
import time

from mesatron_data.stream import TrainStream

TRAINING_TOKENS_PER_SECOND = 280_600  # one H200, 146M parameters (docs/results.md)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder")
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--sequences", type=int, default=64)
    parser.add_argument("--seconds", type=float, default=20.0)
    arguments = parser.parse_args()
    for what in ("packed shards", "unpacked shards"):
        stream = TrainStream(arguments.folder, arguments.sequences, workers=arguments.workers)
        clock, cpu, tokens, steps = time.perf_counter(), time.process_time(), 0, 0
        while time.perf_counter() < clock + arguments.seconds and steps < stream.steps_per_epoch:
            tokens += next(stream).tokens.numel()
            steps += 1
        clock, cpu = time.perf_counter() - clock, time.process_time() - cpu
        fetched = stream.figures()["fetched_bytes"]
        stream.close()
        rate, share = tokens / clock, TRAINING_TOKENS_PER_SECOND * cpu / tokens
        print(
            f"{what}: {rate:,.0f} tokens/s on the clock ({rate / TRAINING_TOKENS_PER_SECOND:.1f} x training), "
            f"{tokens / cpu:,.0f} tokens/s of CPU time, {share:.2%} of a core at training's rate, "
            f"{tokens / 1e6:.0f}M tokens, {fetched / 1e6:.0f} MB of packed shards"
        )


if __name__ == "__main__":
    main()
