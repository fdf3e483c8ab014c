#!/usr/bin/env bash
#SBATCH --job-name=megatron_recompute
#SBATCH --nodes=35
#SBATCH --exclusive
#SBATCH --output=%x-%j.out
# Megatron-LM (arXiv 2205.05198), table 5: full and selective recomputation, 22B and 530B; 280 A100.
#
#   sbatch --gpus-per-node=8 scripts/paper/megatron_recompute.sh      # measured
#   bash scripts/paper/megatron_recompute.sh --predict                # predicted, here
#   bash scripts/paper/megatron_recompute.sh --dry-run [PATTERN]      # rehearsed, here; those whose name matches
set -euo pipefail
unset CDPATH
cd -- "${REPOSITORY:-${SLURM_SUBMIT_DIR:-$(dirname "$(readlink -f "${BASH_SOURCE[0]}")")/../..}}"
# shellcheck source=scripts/paper/run.sh
source scripts/paper/run.sh
run_table megatron_recompute "$@"
