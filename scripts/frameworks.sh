#!/usr/bin/env bash
# Does a post-training framework train on segments? Makes .venv-NAME with the versions in tests/frameworks/NAME.txt, which
# takes some GB the first time, and runs the tests of that framework there, on two ranks of the CPU. Further words go to
# pytest.
#
#   bash scripts/frameworks.sh verl
#   bash scripts/frameworks.sh verl -k packed
set -euo pipefail
cd "$(dirname "$(readlink -f "${BASH_SOURCE[0]}")")/.."
# shellcheck source=scripts/checks.sh
source scripts/checks.sh
help_if_asked scripts/frameworks.sh "$@"

name=${1:-}
versions=tests/frameworks/$name.txt
if [ -z "$name" ] || [ ! -f "$versions" ]; then
    known=$(cd tests/frameworks && printf '%s ' *.txt)
    die "name one framework of these: ${known//.txt/}"
fi
bash scripts/setup.sh
folder=.venv-$name
made_of="$(cat "$versions" scripts/frameworks.sh | cksum) $PWD"
if [ "$(cat "$folder/.made-of" 2>/dev/null)" != "$made_of" ]; then
    uv=uv
    command -v uv >/dev/null || uv=.uv/bin/uv
    echo "Installing into $folder ..."
    emptied_folder "$folder"
    "$uv" venv --quiet --allow-existing --python .venv/bin/python "$folder"
    # All versions are in the file, so that what a framework asks for beside does not change them. One package of
    # Megatron-Bridge's is built for a newer glibc than many systems have; the tests run its Python alone.
    "$uv" pip install --quiet --no-deps --python "$folder/bin/python" --python-platform "$(uname -m)-manylinux_2_39" \
        -r "$versions" -e .
    echo "$made_of" >"$folder/.made-of"
fi
# Tests start many processes; without byte code each would compile torch and Megatron anew.
unset PYTHONDONTWRITEBYTECODE
export OMP_NUM_THREADS=1
exec "$folder/bin/python" -m pytest "tests/frameworks/test_${name//-/_}.py" "${@:2}"
