#!/usr/bin/env bash
# Runs what needs no engine and no trained model with the lowest versions in pyproject.toml, in an environment that it
# makes with uv: bash tests/lowest.sh DIR [pytest's arguments]
set -euo pipefail
dir=$(realpath -m "$1")
shift
cd "$(dirname "$0")/.."
rooms=(cli convert files formats hub plan registry weights)
tools='compressed-tensors|gguf|hypothesis|jsonschema|matplotlib|numba|pytest|pytest-xdist'

[ -d "$dir" ] || uv venv --python 3.10 "$dir"
grep -oE "\"($tools)>=[^\",]+" pyproject.toml | tr -d '"' | sort -u |
    xargs uv pip install --python "$dir" --resolution lowest-direct -e .
# The ignored models are of classes that only a newer transformers has, or names otherwise. An old library may warn that
# its newer dependency will change.
"$dir/bin/python" -m pytest -W ignore::DeprecationWarning "${rooms[@]/#/tests/}" \
    --ignore tests/registry/test_every_architecture.py \
    --deselect tests/plan/test_unchanged.py::test_layers_by_another_name_have_scales "$@"
