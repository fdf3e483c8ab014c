# shellcheck shell=bash
# What the launchers of this folder share: run_table TABLE [--predict | --dry-run] [PATTERN].
#
# Under Slurm every run of a table takes place one after another in the allocation, and leaves a log in LOGS. Those whose
# log is there already are skipped, so a job that ended early is submitted again as it is. Then
#   python tools/paper_tables.py --logs logs/paper
# sets the measured figures beside the published and the predicted ones.

# shellcheck source=scripts/checks.sh
source scripts/checks.sh
# shellcheck source=scripts/python.sh
source scripts/python.sh
: "${LOGS:=logs/paper}"
: "${GPUS_PER_NODE:=8}"
check_numbers 9999 GPUS_PER_NODE

run_table() {
    local table=$1 mode=${2:-} pattern=.
    help_if_asked "scripts/paper/$table.sh" "${@:2}"
    case $mode in
        --predict | --dry-run) check_words "scripts/paper/$table.sh" 1 "${@:3}" ;;
        *) check_words "scripts/paper/$table.sh" 1 "${@:2}" ;;
    esac
    check_modules megatron.seq1f1b
    if [ "$mode" = --predict ]; then
        exec "$PYTHON" tools/paper_launches.py "$table" --predict
    fi
    if [ "$mode" = --dry-run ]; then
        pattern=${3:-.}
    else
        pattern=${mode:-.}
        [ -n "${SLURM_JOB_ID:-}" ] || die "submit this with sbatch, or give --predict or --dry-run."
        make_folder "$LOGS" LOGS
    fi
    local launches name gpus flags words found=0
    launches=$("$PYTHON" tools/paper_launches.py "$table")
    while IFS=$'\t' read -r name gpus flags; do
        [[ $name =~ $pattern ]] || continue
        found=1
        read -ra words <<<"$flags"
        if [ "$mode" = --dry-run ]; then
            echo "== $name"
            WORLD_SIZE=$gpus "$PYTHON" pretrain_gpt.py "${words[@]}" --dry-run </dev/null || true # OOM is an answer, too
        elif [ -s "$LOGS/$name.log" ]; then
            echo "$name: $LOGS/$name.log is there already"
        else
            run "$gpus" "${words[@]}" >"$LOGS/$name.part" 2>&1 </dev/null || echo "$name failed: $LOGS/$name.part"
            ! grep -q 'elapsed time per iteration' "$LOGS/$name.part" || mv "$LOGS/$name.part" "$LOGS/$name.log"
        fi
    done <<<"$launches"
    ((found)) || die "no run of $table matches $pattern; tools/paper_launches.py $table lists them."
}

# run GPUS FLAG...: one training run on that many GPUs of the allocation.
run() {
    local gpus=$1 per_node=$GPUS_PER_NODE
    shift
    # shellcheck source=scripts/slurm/ranks.sh
    source scripts/slurm/ranks.sh
    export CUDA_DEVICE_MAX_CONNECTIONS=1
    ((gpus > per_node)) || per_node=$gpus
    srun --nodes=$((gpus / per_node)) --ntasks="$gpus" --ntasks-per-node="$per_node" --kill-on-bad-exit=1 \
        bash -c "$as_rank"'exec "$@"' rank "$PYTHON" pretrain_gpt.py "$@"
}
