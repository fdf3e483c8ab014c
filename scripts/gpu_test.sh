#!/usr/bin/env bash
# The checks that need a GPU: one of them, 9 minutes at most, no network, nothing to compile. PYTHON needs torch and
# megatron-core, from their wheels. Without a GPU it ends with a sentence. Arguments go to tests/gpu_tests/run.py (see its --help).
#
#   bash scripts/gpu_test.sh                       # or PYTHON=/path/to/python bash scripts/gpu_test.sh
#   bash scripts/gpu_test.sh --device cpu --tiny   # shows on a CPU that the checks themselves run
set -euo pipefail
cd "$(dirname "$(readlink -f "${BASH_SOURCE[0]}")")/.."
# shellcheck source=scripts/checks.sh
source scripts/checks.sh

PYTHON=${PYTHON:-$([ -x .venv/bin/python ] && echo .venv/bin/python || echo python3)}
"$PYTHON" -c 'from importlib.util import find_spec; find_spec("megatron.core").name' 2>/dev/null || {
    die "$PYTHON has no megatron-core: run bash scripts/setup.sh, or set PYTHON."
}
exec "$PYTHON" tests/gpu_tests/run.py "$@"
