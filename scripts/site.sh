#!/usr/bin/env bash
# Build the documentation as a site, its playground with the Python that runs in the browser (Pyodide; needs npm).
#
#   bash scripts/site.sh            # in build/site
#   bash scripts/site.sh FOLDER
set -euo pipefail
cd "$(dirname "$0")/.."

version=314.0.7
: "${PYTHON:=.venv/bin/python}"
if ! grep -qs "\"version\": \"$version\"" build/pyodide/package.json; then
    mkdir -p build
    rm -rf build/pyodide build/package
    tar -xzf "build/$(npm pack --silent --pack-destination build "pyodide@$version")" -C build
    mv build/package build/pyodide
    rm "build/pyodide-$version.tgz"
fi
"$PYTHON" -m mkdocs build --quiet --strict --site-dir "${1:-build/site}"
