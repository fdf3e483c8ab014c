#!/usr/bin/env bash
# Check a cluster before the first job, in two minutes: software and devices alike on all ranks, messages and all-reduces
# right and at which speed, the folder of the checkpoints. The last line is the verdict; the exit code is 1 if it is bad.
#
#   bash scripts/check_cluster.sh                                     # the GPUs of this machine, or two CPU processes
#   salloc --nodes=4 --gpus-per-node=8 bash scripts/check_cluster.sh  # all nodes of a Slurm allocation
#   bash scripts/check_cluster.sh --folder /shared/checkpoints --megabytes 256
#
# With CONTAINER_IMAGE and CONTAINER_MOUNTS the ranks of an allocation run in that container (docs/slurm.md).
set -euo pipefail
cd "$(dirname "$(readlink -f "${BASH_SOURCE[0]}")")/.."
# shellcheck source=scripts/checks.sh
source scripts/checks.sh
help_if_asked scripts/check_cluster.sh "$@"
if [ -n "${CONTAINER_IMAGE:-}" ]; then
    [ -n "${SLURM_JOB_NODELIST:-}" ] || die "CONTAINER_IMAGE is for an allocation of Slurm: start this with salloc."
    : "${PYTHON:=python3}" # the container's
else
    # shellcheck source=scripts/python.sh
    source scripts/python.sh
    check_modules torch
fi
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-1}
if [ -z "${GPUS_PER_NODE:-}" ]; then
    GPUS_PER_NODE=${SLURM_GPUS_ON_NODE:-$({ nvidia-smi -L 2>/dev/null || true; } | grep -c ^GPU || true)}
    [ "$GPUS_PER_NODE" != 0 ] || GPUS_PER_NODE=2
fi
check_numbers 9999 GPUS_PER_NODE

# Within a container of a task there is no command of Slurm: what is checked is this machine.
if [ -z "${SLURM_JOB_NODELIST:-}" ] || ! command -v scontrol >/dev/null; then
    exec "$PYTHON" "${torchrun[@]}" --nproc-per-node "$GPUS_PER_NODE" tools/check_cluster.py "$@"
fi
nodes=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | wc -l)
# shellcheck source=scripts/slurm/ranks.sh
source scripts/slurm/ranks.sh
exec srun --ntasks=$((nodes * GPUS_PER_NODE)) --ntasks-per-node="$GPUS_PER_NODE" --overcommit --kill-on-bad-exit=1 \
    "${where[@]}" bash -c "$as_rank"'exec "$@"' rank "$PYTHON" tools/check_cluster.py "$@"
