#!/usr/bin/env bash
#SBATCH --job-name=megatron_sc21
#SBATCH --nodes=384
#SBATCH --exclusive
#SBATCH --output=%x-%j.out
# Megatron-LM at SC21 (arXiv 2104.04473), table 1: 1.7B to 1T on 32 to 3072 A100.
#
#   sbatch --gpus-per-node=8 scripts/paper/megatron_sc21.sh      # measured
#   bash scripts/paper/megatron_sc21.sh --predict                # predicted, here
#   bash scripts/paper/megatron_sc21.sh --dry-run [PATTERN]      # rehearsed, here; those whose name matches
set -euo pipefail
unset CDPATH
cd -- "${REPOSITORY:-${SLURM_SUBMIT_DIR:-$(dirname "$(readlink -f "${BASH_SOURCE[0]}")")/../..}}"
# shellcheck source=scripts/paper/run.sh
source scripts/paper/run.sh
run_table megatron_sc21 "$@"
