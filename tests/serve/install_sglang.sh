#!/usr/bin/env bash
# Installs what SGLang's own loader needs on a CPU into a virtual environment: install_sglang.sh DIR   (about 4 minutes, 3 GB)
# Then OPENQUANT_SGLANG=DIR/bin/python runs test_sglang.py. Its kernels are left out and its pin of torch is not met: it
# reads configs and loads weights here, and serves nothing. Needs Linux on x86-64 and Python 3.11 or newer as python3 (or
# named by PYTHON). Does nothing where DIR has this version.
set -euo pipefail
dir=${1:?usage: install_sglang.sh DIR}
# The version that openquant/version.py cites.
version=$(sed -n 's/.*"SGLang": "\([^"]*\)".*/\1/p' "$(dirname "$0")/../../openquant/version.py")

# Made last, so an installation that was interrupted is done again.
whole=$dir/ok-$version
if [ -e "$whole" ]; then
  echo "sglang $version is already in $dir"
  exit 0
fi

"${PYTHON:-python3}" -m venv "$dir"
pip() { "$dir/bin/python" -m pip --disable-pip-version-check --quiet "$@"; }
pip install torch==2.13.0 # Any build of this version runs.
# Those with a torch of their own in mind; torchvision goes with the one above.
pip install --no-deps "sglang==$version" torchvision==0.28.0 xgrammar outlines==0.1.11 outlines-core==0.1.26

# What it requires, but for kernels, other builds of torch, and what only serving needs.
"$dir/bin/python" - > "$dir/requirements.txt" << 'PYTHON'
import re
from importlib.metadata import requires
from pip._vendor.packaging.requirements import Requirement

LEFT_OUT = re.compile(
    r"torch.*|tokenizers|xgrammar|outlines|sgl-.*|sglang-kernel|cuda-.*|nvidia-(?!ml-py).*|nvshmem.*|flash.*|humming-.*|quack-.*"
    r"|tilelang|tml-.*|timm|av|decord2|deepseek-recipe|smg-.*|ninja|build|soundfile|sentencepiece"
)
for line in requires("sglang"):
    found = Requirement(line)
    if LEFT_OUT.fullmatch(found.name.lower()) or "extra" in str(found.marker or ""):
        continue
    if found.marker is None or found.marker.evaluate():
        print(f"{found.name}{found.specifier}")
# What those left out would bring along.
print("accelerate\nairportsdata\ncloudpickle\ndiskcache\njsonschema\nlark\nnest-asyncio\npycountry\nreferencing")
print("sentencepiece\nsoundfile\ntriton")
PYTHON
pip install -r "$dir/requirements.txt"
"$dir/bin/python" -c 'from importlib.metadata import version; print("sglang", version("sglang"))'
touch "$whole"
