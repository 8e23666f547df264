#!/usr/bin/env bash
# Install the system packages of a list (one name a line) where that is possible; otherwise say which are missing and go on.
set -euo pipefail

missing=()
while read -r name; do
    [[ -z $name || $name == \#* ]] && continue
    dpkg-query -W -f '${Status}' "$name" 2>/dev/null | grep -q 'install ok installed' || missing+=("$name")
done <"$1"
((${#missing[@]})) || exit 0

if [[ $(id -u) == 0 ]] && command -v apt-get >/dev/null; then
    echo "installing ${missing[*]}"
    export DEBIAN_FRONTEND=noninteractive
    if apt-get update -qq && apt-get install -y -qq --no-install-recommends "${missing[@]}" >/dev/null; then
        exit 0
    fi
fi
{
    echo '***'
    echo "*** NOT INSTALLED: ${missing[*]}"
    echo '*** vLLM on the CPU needs libnuma1, SGLang g++ and libssl-dev; the tests of shared folders need bindfs'
    echo '*** and fuse3, the figures of disks fio, the comparison with Mooncake the others; they are skipped without them.'
    echo "*** As root: apt-get install ${missing[*]}"
    echo '***'
} >&2
