#!/usr/bin/env bash
# Make .venv with this package and what its tests need, or bring it up to date.
#
#   bash scripts/setup.sh              # or PYTHON=/path/to/python3.12 bash scripts/setup.sh
#
# Inside an environment that has torch and megatron-core (a container, for instance), there is no need of
# it: pip install -e .
set -euo pipefail
cd "$(dirname "$0")/.."
# shellcheck source=scripts/own_folder.sh
source scripts/own_folder.sh

# Whether a command is a Python >= 3.12. A pyenv shim can exist and fail, so it is really run.
is_python() {
    [ -n "$1" ] && "$1" -c 'import sys; sys.exit(sys.version_info < (3, 12))' >/dev/null 2>&1
}

# Print the path of the first Python that will do.
find_python() {
    local candidate
    for candidate in "${PYTHON:-}" python3.12 python3 \
        "${PYENV_ROOT:-$HOME/.pyenv}"/versions/3.{12,13,14}*/bin/python; do
        if is_python "$candidate"; then
            "$candidate" -c 'import sys; print(sys.executable)'
            return
        fi
    done
    echo "No Python 3.12 or later was found: install one, or name it in PYTHON=/path/to/python." >&2
    return 1
}

# Print the path of a uv that runs, after bringing one in with pip where there is none.
find_uv() {
    local candidate
    for candidate in uv .uv/bin/uv; do
        if "$candidate" --version >/dev/null 2>&1; then
            echo "$candidate"
            return
        fi
    done
    echo "Bringing in uv with pip ..." >&2
    # Into an environment of its own; Debian's Python may lack venv, and then has pip itself.
    { "$1" -m venv .uv && .uv/bin/python -m pip install --quiet uv; } >&2 ||
        "$1" -m pip install --quiet --target .uv uv >&2
    echo .uv/bin/uv
}

python=$(find_python)
uv=$(find_uv "$python")
export UV_PYTHON_DOWNLOADS=never

if ! is_python .venv/bin/python; then
    own_folder .venv
    rm -rf .venv # uv clears no folder that is not an environment
    "$uv" venv --quiet --python "$python" .venv
    touch .venv/.made-by-seq1f1b
fi
echo "Installing into .venv ($(.venv/bin/python --version)) ..."
"$uv" pip install --quiet --python .venv/bin/python -c constraints.txt -e '.[train,test,tensorboard,docs]'
# Its Python alone, without CUDA libraries, apart from the rest: Megatron fails to start where it finds just that.
"$uv" pip install --quiet --python .venv/bin/python -c constraints.txt --no-deps --target .venv/transformer-engine \
    transformer-engine einops ml-dtypes onnx onnx-ir onnxscript
echo "Done: source .venv/bin/activate, or call .venv/bin/python."
