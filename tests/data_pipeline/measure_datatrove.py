"""Speed of `mesatron data prepare` on one core against datatrove's tokenizing of the same files, with one tokenizer.

    python tests/data_pipeline/measure_datatrove.py INPUT_FOLDER TOKENIZER.json DATATROVE_PYTHON [--rounds 3]

DATATROVE_PYTHON is the interpreter of an environment with datatrove and the same version of tokenizers. By turns in
one run, each in a process of its own that is bound to one core; figures are CPU seconds without the imports. datatrove
reads records, tokenizes and writes tokens with an index; preparation also packs, compresses, hashes and flushes.
"""

import argparse
import os
import statistics
import subprocess
import sys
import tempfile

OURS = """
import sys, time
from mesatron_data.mosaic import streaming
from mesatron_data.shards import prepare
begin = time.process_time()
made = prepare(sys.argv[1], sys.argv[3] + "/out", sys.argv[2], 2048)
print(time.process_time() - begin, sum(split.tokens - split.documents for split in made.manifest.splits.values()))
"""
THEIRS = """
import sys, time
from pathlib import Path
import numpy as np
from datatrove.pipeline.readers import JsonlReader
from datatrove.pipeline.tokens import DocumentTokenizer
begin = time.process_time()
for split in ("train", "validation"):
    writer = DocumentTokenizer(
        sys.argv[3] + "/" + split, tokenizer_name_or_path=sys.argv[2], eos_token=None, shuffle_documents=False
    )
    for _ in writer(JsonlReader(sys.argv[1] + "/" + split, compression="zstd")() , 0, 1) or ():
        pass
seconds = time.process_time() - begin
size = 4 if "--wide" in sys.argv else 2
print(seconds, sum(path.stat().st_size // size for path in Path(sys.argv[3]).rglob("*.ds")))
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("input_folder")
    parser.add_argument("tokenizer")
    parser.add_argument("datatrove_python")
    parser.add_argument("--rounds", type=int, default=3)
    arguments = parser.parse_args()
    os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
    environment = os.environ | {"TOKENIZERS_PARALLELISM": "false", "RAYON_NUM_THREADS": "1"}
    ratios = []
    for _ in range(arguments.rounds):
        seconds = []
        for python, script in ((sys.executable, OURS), (arguments.datatrove_python, THEIRS)):
            with tempfile.TemporaryDirectory() as folder:
                command = [python, "-c", script, arguments.input_folder, arguments.tokenizer, folder]
                done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True, env=environment)
            used, tokens = map(float, done.stdout.split()[-2:])
            seconds.append(used)
            print(
                f"{python}: {tokens:,.0f} tokens in {used:.1f} s of CPU time, {tokens / used:,.0f} tokens/s", flush=True
            )
        ratios.append(seconds[1] / seconds[0])
    listed = ", ".join(f"{ratio:.2f}" for ratio in ratios)
    print(f"datatrove's seconds over ours: {listed}; median {statistics.median(ratios):.2f}")


if __name__ == "__main__":
    main()
