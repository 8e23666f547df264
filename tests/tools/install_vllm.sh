#!/usr/bin/env bash
# install_vllm.sh PYTHON REQUIREMENTS [CONSTRAINTS]: vLLM's CPU build into the environment of PYTHON, unless it is there already.
set -euo pipefail
python=$1 requirements=$2 constraints=${3:-}

pinned_are_installed() {
    "$python" - "$requirements" <<'PY'
import sys
from importlib.metadata import PackageNotFoundError, version

for line in open(sys.argv[1]):
    name, pinned, wanted = line.partition("#")[0].strip().partition("==")
    try:
        if pinned and version(name).partition("+")[0] != wanted:
            sys.exit(1)
    except PackageNotFoundError:
        sys.exit(1)
PY
}

if ! pinned_are_installed; then
    echo "installing vLLM (3.5 GB, some minutes)"
    "$python" -m pip install -q --disable-pip-version-check -r "$requirements" ${constraints:+-c "$constraints"}
fi
# vLLM's CPU build asks for these, but the registry's builds are for CUDA and break `import transformers`.
"$python" -m pip uninstall -q -y --disable-pip-version-check torchvision torchaudio torchcodec 2>/dev/null
