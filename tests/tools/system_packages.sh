#!/usr/bin/env bash
# Install the system packages of a list (one name a line) where that is possible; otherwise say which are missing and go on.
set -euo pipefail

missing=()
look() {
    missing=()
    while read -r name; do
        [[ -z $name || $name == \#* ]] && continue
        dpkg-query -W -f '${Status}' "$name" 2>/dev/null | grep -q 'install ok installed' || missing+=("$name")
    done <"$1"
}
install() {
    DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends "$@" >/dev/null
}

look "$1"
((${#missing[@]})) || exit 0
if [[ $(id -u) == 0 ]] && command -v apt-get >/dev/null; then
    echo "installing ${missing[*]}"
    apt-get update -qq || true # an index that is there may do
    if ! install "${missing[@]}"; then # one name that the distribution lacks, and it installs none
        for name in "${missing[@]}"; do
            install "$name" || true
        done
    fi
    look "$1"
    ((${#missing[@]})) || exit 0
fi
{
    echo '***'
    echo "*** NOT INSTALLED: ${missing[*]}"
    echo "*** $1 says what they are for; tests that need them are skipped, and engines may not start."
    echo "*** As root: apt-get install ${missing[*]}"
    echo '***'
} >&2
