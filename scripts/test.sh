#!/usr/bin/env bash
# Set up, then run the linter and every test. Arguments go to pytest: bash scripts/test.sh -k cpu
set -euo pipefail
cd "$(dirname "$0")/.."

bash scripts/setup.sh
echo "Linting ..."
.venv/bin/ruff check .
echo "Testing ..."
.venv/bin/python -m pytest "$@"
