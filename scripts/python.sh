# shellcheck shell=bash
# The Python of the scripts that set up nothing, and what is installed beside it. Sourced at the root of the repository,
# after checks.sh.

: "${PYTHON:=$([ -x .venv/bin/python ] && echo .venv/bin/python || echo python3)}"

# Set `installed` to those of the modules that $PYTHON finds, without importing them.
find_modules() {
    "$PYTHON" -c 'import sys; sys.exit(sys.version_info < (3, 12))' >/dev/null 2>&1 ||
        die "PYTHON=$PYTHON does not run, or is older than 3.12: run bash scripts/setup.sh, or set PYTHON."
    # -P: what lies in this folder is not installed by that.
    installed=" $("$PYTHON" -P - "$@" 2>/dev/null <<'EOF'
import sys
from importlib.util import find_spec

for name in sys.argv[1:]:
    try:
        if find_spec(name):
            print(name, end=" ")
    except ModuleNotFoundError:
        pass
EOF
    )"
}

# check_modules MODULE...: $PYTHON finds them all. megatron.core is of the package megatron-core.
check_modules() {
    local name installed
    find_modules "$@"
    for name in "$@"; do
        [[ $installed == *" $name "* ]] || die "$PYTHON has no ${name/./-}: run bash scripts/setup.sh, or set PYTHON."
    done
}
