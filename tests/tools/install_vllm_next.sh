#!/usr/bin/env bash
# install_vllm_next.sh PYTHON REQUIREMENTS FOLDER: the Python code of another vLLM, beside the extensions of the one that is
# installed for PYTHON. What goes wrong is said and fails nothing; FOLDER/.made is there only if all went well.
set -euo pipefail
python=$1 requirements=$2 folder=$3

work=$folder.part
trap 'rm -rf "$work"' EXIT

unpack() {
    "$python" -I - "$1" "$2" <<'PY'
import sys
from importlib.util import find_spec
from pathlib import Path
from zipfile import ZipFile

wheel, folder = ZipFile(sys.argv[1]), Path(sys.argv[2])
# Extensions for CUDA, headers and tuned kernels are nine tenths of it and cannot be used here.
wheel.extractall(folder, [name for name in wheel.namelist() if name.endswith(".py") or ".dist-info/" in name])
installed = Path(find_spec("vllm").origin).parent
extensions = sorted(installed.rglob("*.so"))
if not extensions:
    sys.exit(f"no extensions in {installed}")
for extension in extensions:
    link = folder / "vllm" / extension.relative_to(installed)
    link.parent.mkdir(parents=True, exist_ok=True)
    link.symlink_to(extension)
PY
}

make_it() {
    echo "fetching $(sed -n 's/^\([^ #]*==[^ ]*\).*/\1/p' "$requirements") for its Python code (340 MB)"
    rm -rf "$folder" "$work" && mkdir -p "$work" &&
        "$python" -m pip download -q --disable-pip-version-check --retries 2 --no-deps --only-binary=:all: --require-hashes \
            -d "$work" -r "$requirements" &&
        unpack "$work"/vllm-*.whl "$work/unpacked" && mv "$work/unpacked" "$folder" && touch "$folder/.made"
}

make_it || {
    echo '***'
    echo "*** NOT INSTALLED: the Python code of the vLLM in $requirements; its tests are skipped"
    echo '***'
} >&2
