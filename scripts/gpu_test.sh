#!/usr/bin/env bash
# The checks that need a GPU: one of them, 10 minutes at most, no network, nothing to compile. PYTHON needs torch,
# megatron-core, msgspec and greenlet, from their wheels. Without a GPU it ends with a sentence. Arguments go to tests/gpu_tests/run.py (see its --help).
#
#   bash scripts/gpu_test.sh                       # or PYTHON=/path/to/python bash scripts/gpu_test.sh
#   PACKED=gpu_packed bash scripts/gpu_test.sh     # with what scripts/pack_gpu_test.sh has packed: torch is enough
#   bash scripts/gpu_test.sh --device cpu --tiny   # shows on a CPU that the checks themselves run
set -euo pipefail
cd "$(dirname "$(readlink -f "${BASH_SOURCE[0]}")")/.."
# shellcheck source=scripts/checks.sh
source scripts/checks.sh
help_if_asked scripts/gpu_test.sh "$@"
# shellcheck source=scripts/python.sh
source scripts/python.sh

PACKED=${PACKED:-}
export PYTHONPATH=$PWD:$PWD/tests${PYTHONPATH:+:$PYTHONPATH}

preload=()
if [ -n "$PACKED" ]; then
    wheels=("$PACKED"/*.whl)
    [ -f "${wheels[0]}" ] || die "PACKED=$PACKED has no wheels: bash scripts/pack_gpu_test.sh makes such a folder."
    unpacked=$(mktemp -d)
    trap 'rm -rf "$unpacked"' EXIT
    for wheel in "${wheels[@]}"; do
        "$PYTHON" -m zipfile -e "$wheel" "$unpacked"
    done
    export PYTHONPATH=$PYTHONPATH:$unpacked
    if [ -f "$PACKED/libnccl.so.2.xz" ]; then
        "$PYTHON" -c 'import lzma, shutil, sys; shutil.copyfileobj(lzma.open(sys.argv[1]), open(sys.argv[2], "wb"))' \
            "$PACKED/libnccl.so.2.xz" "$unpacked/libnccl.so.2"
        preload=("LD_PRELOAD=$unpacked/libnccl.so.2")
    fi
fi
check_modules torch megatron.core msgspec greenlet
env "${preload[@]}" "$PYTHON" -m gpu_tests.run "$@"
