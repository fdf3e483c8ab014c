#!/usr/bin/env bash
# Does the package work with another Megatron than the installed one? CHECKOUT is a clone of Megatron-LM, which goes first
# on PYTHONPATH. Prints the names that have changed there, then runs what scripts/other_versions.sh names, its own
# pretrain_gpt.py and pretrain_hybrid.py with segments and without, and checkpoints from the installed Megatron to that one
# and back. Twenty minutes on two cores at most. The last line is a row for the table of versions in
# docs/from-megatron-lm.md.
#
#   bash scripts/test_megatron.sh ../Megatron-LM
set -euo pipefail
cd "$(dirname "$(readlink -f "${BASH_SOURCE[0]}")")/.."
# shellcheck source=scripts/checks.sh
source scripts/checks.sh
help_if_asked scripts/test_megatron.sh "$@"
check_words scripts/test_megatron.sh 1 "$@"

[ $# -eq 1 ] && [ -f "$1/megatron/core/package_info.py" ] ||
    die "name a clone of Megatron-LM: bash scripts/test_megatron.sh ../Megatron-LM"
MEGATRON_CHECKOUT=$(readlink -f "$1")
export MEGATRON_CHECKOUT
bash scripts/setup.sh
python=.venv/bin/python
# A wheel ships the helpers of its data sets compiled. Those of a clone are compiled at their first use, which needs
# pybind11; the installed ones serve if their source is the same.
data_sets=megatron/core/datasets
installed=$(echo .venv/lib/python*/site-packages/$data_sets)
if cmp -s "$installed/helpers.cpp" "$MEGATRON_CHECKOUT/$data_sets/helpers.cpp"; then
    cp -n "$installed"/helpers_cpp.*.so "$MEGATRON_CHECKOUT/$data_sets/"
fi
"$python" tools/upstream_names.py --against "$MEGATRON_CHECKOUT" || true
row="| $(git -C "$MEGATRON_CHECKOUT" log -1 --format='%cs, %h' 2>/dev/null || basename "$MEGATRON_CHECKOUT") |"
# shellcheck source=scripts/other_versions.sh
source scripts/other_versions.sh
export PYTHONPATH=$MEGATRON_CHECKOUT
part "${units[@]}"
part "${of_steps[@]}"
part "${trainings[@]}"
part tests/functional_tests/test_megatron_checkout.py

echo "$row $(date +%F) |"
exit "$status"
