#!/usr/bin/env bash
# Make .venv with this package and what its tests need, or bring it up to date.
#
#   bash scripts/setup.sh              # or PYTHON=/path/to/python3.12 bash scripts/setup.sh
#
# Inside an environment that has torch and megatron-core (a container, for instance), there is no need of
# it: pip install -e .
set -euo pipefail
cd "$(dirname "$(readlink -f "${BASH_SOURCE[0]}")")/.."
# shellcheck source=scripts/checks.sh
source scripts/checks.sh

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
    die "no Python 3.12 or later was found: install one, or name it in PYTHON=/path/to/python."
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
    emptied_folder .uv
    # Into an environment of its own; Debian's Python may lack venv, and then has pip itself.
    { "$1" -m venv .uv && .uv/bin/python -m pip install --quiet uv; } >&2 ||
        "$1" -m pip install --quiet --target .uv uv >&2 || die "pip could not bring in uv. $no_index"
    echo .uv/bin/uv
}

# What the environment is made of and where. The last line of this script writes it, so that what was cut short is made
# anew, and what is complete needs neither a network nor a folder that can be written.
made_of="$(cat constraints.txt pyproject.toml scripts/setup.sh | cksum) $PWD"
if is_python .venv/bin/python && [ "$(cat .venv/.made-of 2>/dev/null)" = "$made_of" ]; then
    echo "Set up already: source .venv/bin/activate, or call .venv/bin/python."
    exit
fi
[ -w . ] || die "$PWD cannot be written, so .venv cannot be made there: use a copy, or an environment of your own by PYTHON."
no_index="Is there a network? UV_DEFAULT_INDEX and PIP_INDEX_URL name another index than PyPI, HTTPS_PROXY a proxy."
python=$(find_python)
uv=$(find_uv "$python")
export UV_PYTHON_DOWNLOADS=never

if ! is_python .venv/bin/python; then
    emptied_folder .venv
    "$uv" venv --quiet --allow-existing --python "$python" .venv
fi
# What an earlier start left half written is replaced.
how=()
[ -f .venv/.made-of ] || how=(--reinstall)
rm -f .venv/.made-of
# install WORD...: bring packages into .venv.
install() {
    "$uv" pip install --quiet "${how[@]}" --python .venv/bin/python -c constraints.txt "$@" ||
        die "the packages could not be brought in, as uv says above. $no_index Then start this again."
}
echo "Installing into .venv ($(.venv/bin/python --version)) ..."
install -e '.[train,test,tensorboard,docs]'
# Its Python alone, without CUDA libraries, apart from the rest: Megatron fails to start where it finds just that.
install --no-deps --target .venv/transformer-engine transformer-engine einops ml-dtypes onnx onnx-ir onnxscript
echo "$made_of" >.venv/.made-of
echo "Done: source .venv/bin/activate, or call .venv/bin/python."
