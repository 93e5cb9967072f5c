"""Measure how long training stands still for a save, behind training and in its way, by turns in one run.

    python tests/mesatron/train/measure_saving.py FOLDER
    torchrun --nproc-per-node=2 tests/mesatron/train/measure_saving.py FOLDER --zero-stage 1

FOLDER should be where checkpoints would lie. Prints, of the first process, seconds of a synchronous save, the time that
training stands still for an asynchronous one, until that one is complete, and of a step without and with a save under
way: medians over the rounds.
"""

import argparse
import statistics
import time
from pathlib import Path

import yaml
from mesatron_data.stream import TrainStream
from mesatron_data.synthetic import write_shards

from mesatron.config import accumulation_steps, load_config
from mesatron.config.schema import CheckpointConfig
from mesatron.parallel import distributed
from mesatron.parallel.engine import build_engine
from mesatron.parallel.layout import lay_out
from mesatron.train.saver import Hooks, Saver
from mesatron.train.snapshot import StartState, fragments, generator_states, specifications
from mesatron.train.timing import PhaseTimer

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("folder", type=Path)
parser.add_argument("--width", type=int, default=512)
parser.add_argument("--layers", type=int, default=12)
parser.add_argument("--context-length", type=int, default=64)
parser.add_argument("--zero-stage", type=int, default=1)
parser.add_argument("--rounds", type=int, default=5)
arguments = parser.parse_args()

world = distributed.start()
shards, path, batch_size = arguments.folder / "shards", arguments.folder / "config.yaml", 2 * world.size
if world.is_first:
    write_shards(shards, 32_000, arguments.context_length, {"train": 8 * batch_size, "validation": 1}, seed=0)
    values = {
        "name": "measured", "runs_folder": str(arguments.folder),
        "model": {
            "vocabulary_size": 32_000, "width": arguments.width, "layers": arguments.layers,
            "heads": arguments.width // 64, "head_dim": 64,
        },
        "tokenizer": {"path": "none"},
        "data": {"input_folder": "none", "folder": str(shards), "context_length": arguments.context_length},
        "train": {
            "steps": 100, "global_batch_size": batch_size, "micro_batch_size": 2, "peak_lr": 1e-3, "warmup_steps": 0,
        },
        "parallel": {"zero_stage": arguments.zero_stage},
    }  # fmt: skip
    path.write_text(yaml.safe_dump(values))
world.barrier()
config = load_config(path)
layout, timer = lay_out(config, world), PhaseTimer(world.device)
engine = build_engine(config, layout, accumulation_steps(config, layout.data.size))
engine.restore(StartState(None, engine, config).start_elements, ("weight",))
stream = TrainStream(str(shards), batch_size, layout.data.rank, layout.data.size)
batch = next(stream).split(2)
stream.close()


def step() -> float:
    begin = time.perf_counter()
    engine.update(batch, 100.0, 1e-3, timer)
    timer.read()
    return time.perf_counter() - begin


step()
savers = {
    asynchronous: Saver(
        arguments.folder / "checkpoints", CheckpointConfig(keep_last=1, asynchronous=asynchronous), world, "1",
        specifications(engine, world), lambda: fragments(engine),
        Hooks(lambda: None, lambda words: None, lambda: None),
    )
    for asynchronous in (False, True)
}  # fmt: skip
engine._link_moments()
synchronous, still, whole, alone, beside = [], [], [], [], []
for number in range(arguments.rounds):
    alone += [step() for _ in range(2)]
    world.barrier()
    begin = time.perf_counter()
    savers[False].save(2 * number + 1, generator_states(world), {}, {})
    synchronous.append(time.perf_counter() - begin)
    step()
    world.barrier()
    begin = time.perf_counter()
    savers[True].save(2 * number + 2, generator_states(world), {}, {})
    still.append(time.perf_counter() - begin)
    # As many steps in every process, whose collectives must match.
    while world.sum(float(savers[True].busy))[0]:
        beside.append(step())
    whole.append(time.perf_counter() - begin)
    savers[True].finish()
if world.is_first:
    names = ["synchronous", "stands still", "complete", "step alone", "step beside a save"]
    medians = dict(zip(names, map(statistics.median, (synchronous, still, whole, alone, beside)), strict=True))
    size = 12 * config.model.parameter_count() / 1e9
    print(f"{config.model.parameter_count():,} parameters, {size:.2f} GB, {world.size} processes on {world.device}")
    for name, seconds in medians.items():
        print(f"{name:20} {seconds:8.3f} s")
    print(f"{'share':20} {medians['stands still'] / medians['synchronous']:8.1%}")
distributed.stop()
