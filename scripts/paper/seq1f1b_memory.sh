#!/usr/bin/env bash
#SBATCH --job-name=seq1f1b_memory
#SBATCH --nodes=4
#SBATCH --exclusive
#SBATCH --output=%x-%j.out
# Seq1F1B (arXiv 2406.03488): memory of 2.7B and 7B by method and length; 32 A100.
#
#   sbatch --gpus-per-node=8 scripts/paper/seq1f1b_memory.sh      # measured
#   bash scripts/paper/seq1f1b_memory.sh --predict                # predicted, here
#   bash scripts/paper/seq1f1b_memory.sh --dry-run [PATTERN]      # rehearsed, here; those whose name matches
set -euo pipefail
unset CDPATH
cd -- "${REPOSITORY:-${SLURM_SUBMIT_DIR:-$(dirname "$(readlink -f "${BASH_SOURCE[0]}")")/../..}}"
# shellcheck source=scripts/paper/run.sh
source scripts/paper/run.sh
run_table seq1f1b_memory "$@"
