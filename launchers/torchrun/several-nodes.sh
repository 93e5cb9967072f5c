#!/bin/bash
# Train a run on several machines without Slurm. Start the same line on each, within ten minutes of the first:
#
#   HEAD=10.0.0.1:29500 NODES=4 launchers/torchrun/several-nodes.sh CONFIG [KEY=VALUE ...]
#
# HEAD is an address of the first machine that the others reach (an address rather than a name), with a port that is
# free there. All machines see the same runs_folder and data.folder. PROCESSES is the number on each, by default its
# GPUs. When one fails all end; start all again to go on from the last checkpoint.
set -eu
processes=${PROCESSES:-$(python3 -c 'import torch; print(max(1, torch.cuda.device_count()))')}
settings=$(python3 -m mesatron launch node "$HEAD")
eval "$settings"
export GLOO_SOCKET_IFNAME
exec python3 -m mesatron.torchrun --nnodes="$NODES" --nproc-per-node="$processes" --max-restarts=0 --log-dir=/dev/null \
  --rdzv-backend=c10d --rdzv-endpoint="$HEAD" --rdzv-conf="is_host=$is_host" --local-addr="$address" \
  --rdzv-id="${RUN_ID:-mesatron}" -m mesatron train "$@"
