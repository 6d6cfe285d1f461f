#!/usr/bin/env bash
# Runs what needs no engine and no trained model with the lowest versions in pyproject.toml, in an environment that it
# makes with uv: bash tests/lowest.sh DIR [pytest's arguments]
set -euo pipefail
dir=$(realpath -m "$1")
shift
cd "$(dirname "$0")/.."
lowest() { grep -oE "\"($1)>=[^\",]+" pyproject.toml | tr -d '"' | sort -u; }

[ -d "$dir" ] || uv venv --python 3.10 "$dir"
# shellcheck disable=SC2046
uv pip install --python "$dir" --resolution lowest-direct -e . $(lowest 'gguf|hypothesis|jsonschema|numba|pytest|pytest-xdist')
# It needs a newer torch than we do, but not for what the tests ask of it.
uv pip install --python "$dir" --no-deps "$(lowest compressed-tensors | sed 's/>=/==/')" loguru pydantic pydantic-core \
    annotated-types typing-inspection
rooms=(cli convert files formats hub plan registry weights)
"$dir/bin/python" -m pytest -n 2 --dist loadfile "${rooms[@]/#/tests/}" "$@"
