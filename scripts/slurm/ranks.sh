# shellcheck shell=bash
# How the tasks of a Slurm job become ranks that find each other. Sourced within the job.

read -r MASTER_ADDR < <(scontrol show hostnames "$SLURM_JOB_NODELIST")
# A port of its own for each job, below the ports that systems hand out by themselves.
export MASTER_ADDR MASTER_PORT=${MASTER_PORT:-$((10000 + SLURM_JOB_ID % 20000))}

# What each task starts with: srun ... bash -c "$as_rank"'exec "$@"' rank COMMAND...
# shellcheck disable=SC2016 # expanded in the task
as_rank='export RANK=$SLURM_PROCID LOCAL_RANK=$SLURM_LOCALID WORLD_SIZE=$SLURM_NTASKS; '
# In a container the variables of its image win over those that are exported here (pyxis).
for kept_variable in MASTER_ADDR MASTER_PORT OMP_NUM_THREADS CUDA_DEVICE_MAX_CONNECTIONS CUDA_MODULE_LOADING \
    PYTORCH_ALLOC_CONF PYTORCH_CUDA_ALLOC_CONF; do
    [ -z "${!kept_variable:-}" ] || as_rank+="export $kept_variable=${!kept_variable@Q}; "
done
unset kept_variable

# Where the tasks run: srun "${where[@]}" ... With CONTAINER_IMAGE in that container, which sees CONTAINER_MOUNTS; pyxis
# takes these flags.
where=()
if [ -n "${CONTAINER_IMAGE:-}" ]; then
    # shellcheck disable=SC2034 # used where this is sourced
    where=(--container-image="$CONTAINER_IMAGE" --container-mounts="${CONTAINER_MOUNTS:-$PWD}"
        --container-workdir="$PWD" --no-container-mount-home)
fi
