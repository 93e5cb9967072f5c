#!/bin/bash
# Train a run on this machine, one process for each of its GPUs (or PROCESSES of them):
#
#   PROCESSES=2 launchers/torchrun/one-node.sh CONFIG [KEY=VALUE ...]
#
# `mesatron train CONFIG --processes 2` does the same.
set -eu
processes=${PROCESSES:-$(python3 -c 'import torch; print(max(1, torch.cuda.device_count()))')}
exec python3 -m mesatron.torchrun --nnodes=1 --nproc-per-node="$processes" --max-restarts=0 --log-dir=/dev/null \
  --rdzv-backend=c10d --rdzv-endpoint=127.0.0.1:0 -m mesatron train "$@"
