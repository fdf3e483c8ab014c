#!/usr/bin/env bash
#SBATCH --job-name=zero_bubble
#SBATCH --nodes=2
#SBATCH --exclusive
#SBATCH --output=%x-%j.out
# Zero Bubble (arXiv 2401.10241), tables 3 to 5: 1.5B and 6.2B, by method and number of micro-batches; 16 A100.
#
#   sbatch --gpus-per-node=8 scripts/paper/zero_bubble.sh      # measured
#   bash scripts/paper/zero_bubble.sh --predict                # predicted, here
#   bash scripts/paper/zero_bubble.sh --dry-run [PATTERN]      # rehearsed, here; those whose name matches
set -euo pipefail
unset CDPATH
cd -- "${REPOSITORY:-${SLURM_SUBMIT_DIR:-$(dirname "$(readlink -f "${BASH_SOURCE[0]}")")/../..}}"
# shellcheck source=scripts/paper/run.sh
source scripts/paper/run.sh
run_table zero_bubble "$@"
