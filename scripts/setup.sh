#!/usr/bin/env bash
# Make .venv with this package and what its tests need, or bring it up to date.
#
#   bash scripts/setup.sh              # or PYTHON=/path/to/python3.12 bash scripts/setup.sh
#   bash scripts/setup.sh 2.11.0       # another PyTorch than the pinned one, in .venv-torch-2.11.0
#
# Inside an environment that has torch and megatron-core (a container, for instance), there is no need of
# it: pip install -e .
set -euo pipefail
cd "$(dirname "$(readlink -f "${BASH_SOURCE[0]}")")/.."
# shellcheck source=scripts/checks.sh
source scripts/checks.sh
help_if_asked scripts/setup.sh "$@"
check_words scripts/setup.sh 1 "$@"

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

torch=${1:-}
[[ $torch =~ ^([0-9]+\.[0-9]+(\.[0-9]+)?((a|b|rc|\.dev|\+)[0-9A-Za-z.]+)?)?$ ]] ||
    die "$torch is no version of PyTorch, such as 2.11.0."
folder=.venv${torch:+-torch-$torch}

# What the environment is made of and where. The last line of this script writes it, so that what was cut short is made
# anew, and what is complete needs neither a network nor a folder that can be written.
made_of="$(cat constraints.txt pyproject.toml scripts/setup.sh | cksum) $PWD"
if is_python "$folder/bin/python" && [ "$(cat "$folder/.made-of" 2>/dev/null)" = "$made_of" ]; then
    echo "Set up already: source $folder/bin/activate, or call $folder/bin/python."
    exit
fi
[ -w . ] || die "$PWD cannot be written, so $folder cannot be made there: use a copy, or an environment of your own by PYTHON."
no_index="Is there a network? UV_DEFAULT_INDEX and PIP_INDEX_URL name another index than PyPI, HTTPS_PROXY a proxy."
python=$(find_python)
uv=$(find_uv "$python")
export UV_PYTHON_DOWNLOADS=never

if ! is_python "$folder/bin/python"; then
    emptied_folder "$folder"
    "$uv" venv --quiet --allow-existing --python "$python" "$folder"
fi
# What an earlier start left half written is replaced.
how=()
[ -f "$folder/.made-of" ] || how=(--reinstall)
rm -f "$folder/.made-of"
constraints=constraints.txt
if [ -n "$torch" ]; then
    # Every PyTorch needs a Triton of its own, and older ones an older setuptools.
    constraints=$folder/constraints.txt
    grep -vE '^(torch|triton|setuptools)==' constraints.txt >"$constraints"
    echo "torch==$torch" >>"$constraints"
fi
# install WORD...: bring packages into the environment.
install() {
    "$uv" pip install --quiet "${how[@]}" --python "$folder/bin/python" -c "$constraints" "$@" ||
        die "the packages could not be brought in, as uv says above. $no_index Then start this again."
}
echo "Installing into $folder ($("$folder/bin/python" --version)): 5.2 GB, in one to several minutes, as fast as the network is ..."
install -e '.[train,test,tensorboard,docs]'
# Its Python alone, without CUDA libraries, apart from the rest: Megatron fails to start where it finds just that.
install --no-deps --target "$folder/transformer-engine" transformer-engine einops ml-dtypes onnx onnx-ir onnxscript
echo "$made_of" >"$folder/.made-of"
echo "Done: source $folder/bin/activate, or call $folder/bin/python."
