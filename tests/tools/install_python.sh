#!/usr/bin/env bash
# install_python.sh [--lowest] VERSION REQUIREMENTS FOLDER WHEEL [PIP ARGUMENTS]: an environment in FOLDER of the Python VERSION that
# is found on this machine, with WHEEL and REQUIREMENTS. With --lowest all that the wheel asks for is of the lowest version it
# declares. What goes wrong is said and fails nothing; FOLDER/.made is there only if all went well.
set -euo pipefail
lowest=
if [[ $1 == --lowest ]]; then lowest=yes && shift; fi
version=$1 requirements=$2 folder=$3 wheel=$4
shift 4

# One on the PATH may be pyenv's, which only says which versions have it; those have no command of that name.
find_python() {
    local candidate
    for candidate in "python$version" "$(pyenv root 2>/dev/null)"/versions/"$version".*/bin/python; do
        if "$candidate" -c 'import ensurepip, venv' 2>/dev/null; then
            echo "$candidate"
            return
        fi
    done
    echo "there is no Python $version with its module venv, neither on the PATH nor pyenv's" >&2
    return 1
}

# Of the extras those that the tests need.
lowest_versions() {
    "$folder/bin/python" - <<'PY'
import re
from importlib.metadata import requires

for requirement in requires("mooncake-connector"):
    declared, _, marker = requirement.partition(";")
    extra = re.search(r"extra == .(\w+)", marker)
    if extra is None or extra[1] in ("index", "object"):
        print(declared.replace(">=", "=="), "" if extra else marker, sep=";")
PY
}

install() {
    "$folder/bin/python" -m pip install -q --disable-pip-version-check "$@"
}

make_it() {
    local python
    rm -f "$folder/.made"
    python=$(find_python) || return
    [[ -x $folder/bin/python ]] || "$python" -m venv "$folder" || return
    # The same version is built again and again.
    install --no-deps --force-reinstall "$wheel" || return
    if [[ $lowest ]]; then
        lowest_versions >"$folder/lowest.txt" && install -r "$folder/lowest.txt" -r "$requirements" "$@" || return
    else
        install "$wheel[index,object]" -r "$requirements" "$@" || return
    fi
    touch "$folder/.made"
}

make_it "$@" || {
    echo '***'
    echo "*** NOT INSTALLED: $folder with Python $version; its tests are skipped"
    echo '***'
} >&2
