#!/usr/bin/env bash
# Set up, then run the linters and the tests: the unit and the functional ones.
#
#   bash scripts/test.sh                  # the last lines have the time of each tier
#   bash scripts/test.sh -m unit          # those without ranks; other arguments go to pytest, too: -k zb-h1
#   bash scripts/test.sh --exhaustive     # every case of every matrix
set -euo pipefail
cd "$(dirname "$(readlink -f "${BASH_SOURCE[0]}")")/.."
# shellcheck source=scripts/checks.sh
source scripts/checks.sh
help_if_asked scripts/test.sh "$@"

case "${1:-}" in
    '') set -- -m 'not exhaustive' ;;
    --exhaustive) shift ;;
esac

bash scripts/setup.sh
# Tests start many processes; without byte code each would compile torch and Megatron anew.
unset PYTHONDONTWRITEBYTECODE
echo "Linting ..."
.venv/bin/ruff check .
.venv/bin/mypy
echo "Testing ..."
# Two tests at a time, of different files; one thread each, and one each of their ranks.
export OMP_NUM_THREADS=1
.venv/bin/python -m pytest --numprocesses 2 --dist loadfile --no-loadscope-reorder "$@"
