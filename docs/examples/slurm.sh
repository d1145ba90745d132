#!/usr/bin/env bash
#SBATCH --job-name=fsdp-overlap
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=1      # torchrun, which starts the ranks
#SBATCH --gpus-per-node=8
#SBATCH --cpus-per-task=64
#SBATCH --time=12:00:00
#SBATCH --signal=B:USR1@120      # to this script, two minutes before the time is over
#SBATCH --requeue                # if it is preempted or a machine fails
#SBATCH --open-mode=append       # one log, however often it starts

# Trains the main job on several machines under Slurm. Arguments are those of `fsdp-overlap train`:
#
#     sbatch docs/examples/slurm.sh --steps 20000 --data /shared/text
#
# A job that is queued again has the same number, by which `train` knows that the run is its own,
# and goes on with it. RANKS=4 starts so many on each machine instead of one per GPU.
set -euo pipefail
mapfile -t machines < <(scontrol show hostnames "$SLURM_JOB_NODELIST")
endpoint="${machines[0]}:$((20000 + SLURM_JOB_ID % 10000))"
# Newer versions of torchrun kill ranks that have not saved after so many seconds, older ones after 30.
export TORCH_ELASTIC_SHUTDOWN_TIMEOUT=90

save_and_requeue() {
    scancel --signal=TERM "$SLURM_JOB_ID" # not to this script, but to the ranks, which save and end
    wait "$ranks" || true
    scontrol requeue "$SLURM_JOB_ID"
    exit 0
}
trap save_and_requeue USR1

# In the background, so that the trap does not have to wait for it.
srun --ntasks-per-node=1 --kill-on-bad-exit=1 \
    torchrun \
    --nnodes "$SLURM_NNODES" --nproc-per-node "${RANKS:-auto}" \
    --rdzv-backend c10d --rdzv-endpoint "$endpoint" --rdzv-id "$SLURM_JOB_ID" \
    --max-restarts 3 \
    -m fsdp_overlap train --out "runs/$SLURM_JOB_ID" "$@" &
ranks=$!
wait "$ranks"
