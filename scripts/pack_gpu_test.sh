#!/usr/bin/env bash
# Pack what scripts/gpu_test.sh needs on a machine that has torch, a GPU and no network, into a folder of 40 MB: the wheels
# of megatron-core, msgspec and greenlet, and an NCCL that lets several ranks share one GPU, with the code of one architecture.
#
#   bash scripts/pack_gpu_test.sh gpu_packed                # here, with a network
#   PACKED=gpu_packed bash scripts/gpu_test.sh              # there, after copying the repository and the folder
#
# ARCHITECTURE=80 is for A100, 90 (the default) for Hopper; NCCL=nvidia-nccl-cu12==... for a torch of CUDA 12. Needs pip in
# PYTHON (default: python3).
set -euo pipefail
cd "$(dirname "$(readlink -f "${BASH_SOURCE[0]}")")/.."
# shellcheck source=scripts/checks.sh
source scripts/checks.sh
help_if_asked scripts/pack_gpu_test.sh "$@"
check_words scripts/pack_gpu_test.sh 1 "$@"

PYTHON=${PYTHON:-python3}
NCCL=${NCCL:-nvidia-nccl-cu13==2.30.7}
ARCHITECTURE=${ARCHITECTURE:-90}
[ $# = 1 ] || die "name the folder to pack into: bash scripts/pack_gpu_test.sh gpu_packed"
check_numbers 999 ARCHITECTURE
emptied_folder "$1"

# download PACKAGE FOLDER: its wheel for Linux on x86-64.
download() {
    "$PYTHON" -m pip download --quiet --no-deps --only-binary :all: --python-version 3.12 \
        --platform manylinux_2_28_x86_64 --platform manylinux_2_18_x86_64 --platform manylinux_2_17_x86_64 \
        --platform any --dest "$2" "$1" ||
        die "$PYTHON could not download $1 with pip."
}

for package in megatron-core msgspec greenlet; do
    download "$(grep "^$package==" constraints.txt)" "$1"
done
whole=$(mktemp -d)
trap 'rm -rf "$whole"' EXIT
download "$NCCL" "$whole"
"$PYTHON" scripts/one_architecture.py "$whole"/*.whl "$1/libnccl.so.2.xz" "$ARCHITECTURE"
du -sh "$1"
