# shellcheck shell=bash
# How the tasks of a Slurm job become ranks that find each other. Sourced within the job.

read -r MASTER_ADDR < <(scontrol show hostnames "$SLURM_JOB_NODELIST")
# A port of its own for each job, below the ports that systems hand out by themselves.
export MASTER_ADDR MASTER_PORT=${MASTER_PORT:-$((10000 + SLURM_JOB_ID % 20000))}

# What each task starts with: srun ... bash -c "$as_rank"'exec "$@"' rank COMMAND...
# shellcheck disable=SC2016,SC2034 # expanded in the task, used where this is sourced
as_rank='export RANK=$SLURM_PROCID LOCAL_RANK=$SLURM_LOCALID WORLD_SIZE=$SLURM_NTASKS; '
