#!/usr/bin/env bash
# Trains docs/examples/training.py on several machines. Run the same command on each of them:
#
#     docs/examples/torchrun.sh host0:29400 2 --folder /shared/run --epochs 3
#
# host0:29400  the first machine and a free port of it, where all meet
# 2            how many machines there are
#
# What follows is for the program. RANKS=4 starts so many on this machine instead of one per GPU.
set -euo pipefail
endpoint=$1
machines=$2
shift 2

# When a rank dies, torchrun starts all of them again, and the program goes on from its last
# checkpoint. By default torchrun keeps the store in which ranks find each other, with the addresses
# of the dead ones in it; with this, each start has a new one.
export TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1

exec torchrun \
    --nnodes "$machines" --nproc-per-node "${RANKS:-auto}" \
    --rdzv-backend c10d --rdzv-endpoint "$endpoint" --rdzv-id training \
    --max-restarts 3 \
    "$(dirname "$0")/training.py" "$@"
