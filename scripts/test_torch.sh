#!/usr/bin/env bash
# Does the package work with another PyTorch than the pinned one? Makes .venv-torch-VERSION with it, which takes some GB
# the first time, and runs there what scripts/other_versions.sh names. Ten minutes on two cores at most. The last line is
# a row for the table of versions in docs/install.md.
#
#   bash scripts/test_torch.sh 2.11.0
set -euo pipefail
cd "$(dirname "$(readlink -f "${BASH_SOURCE[0]}")")/.."
# shellcheck source=scripts/checks.sh
source scripts/checks.sh
help_if_asked scripts/test_torch.sh "$@"
check_words scripts/test_torch.sh 1 "$@"

[ -n "${1:-}" ] || die "name one version of PyTorch: bash scripts/test_torch.sh 2.11.0"
version=$1
python=.venv-torch-$version/bin/python
row="| $version |"
bash scripts/setup.sh "$version"
# shellcheck source=scripts/other_versions.sh
source scripts/other_versions.sh
part "${units[@]}"
part "${of_steps[@]}"
part "${trainings[@]}"

echo "$row $(date +%F) |"
exit "$status"
