#!/usr/bin/env bash
#SBATCH --job-name=terapipe
#SBATCH --nodes=48
#SBATCH --exclusive
#SBATCH --output=%x-%j.out
# TeraPipe (arXiv 2102.07988), table 1: ten settings, with and without slices; 384 V100.
#
#   sbatch --gpus-per-node=8 scripts/paper/terapipe.sh      # measured
#   bash scripts/paper/terapipe.sh --predict                # predicted, here
#   bash scripts/paper/terapipe.sh --dry-run [PATTERN]      # rehearsed, here; those whose name matches
set -euo pipefail
unset CDPATH
cd -- "${REPOSITORY:-${SLURM_SUBMIT_DIR:-$(dirname "$(readlink -f "${BASH_SOURCE[0]}")")/../..}}"
# shellcheck source=scripts/paper/run.sh
source scripts/paper/run.sh
run_table terapipe "$@"
