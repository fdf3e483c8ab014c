#!/usr/bin/env bash
# Build the documentation as a site, its playground with the Python that runs in the browser (Pyodide; needs npm).
#
#   bash scripts/site.sh            # in build/site
#   bash scripts/site.sh FOLDER     # a new one, or one of an earlier build
set -euo pipefail
cd "$(dirname "$(readlink -f "${BASH_SOURCE[0]}")")/.."

version=314.0.7
# shellcheck source=scripts/checks.sh
source scripts/checks.sh
help_if_asked scripts/site.sh "$@"
check_words scripts/site.sh 1 "$@"
# shellcheck source=scripts/python.sh
source scripts/python.sh
check_modules mkdocs material mkdocs_glightbox mkdocstrings
own_folder "${1:-build/site}" # MkDocs empties it but for hidden files
if ! grep -qs "\"version\": \"$version\"" build/pyodide/package.json; then
    emptied_folder build/pyodide
    archive=$(npm pack --silent --pack-destination build "pyodide@$version") ||
        die "npm could not bring in pyodide $version: it needs npm, and a network or a registry that npm is set to."
    tar -xzf "build/$archive" --strip-components 1 -C build/pyodide
    rm "build/$archive"
fi
NO_MKDOCS_2_WARNING=1 "$PYTHON" -m mkdocs build --quiet --strict --site-dir "${1:-build/site}"
