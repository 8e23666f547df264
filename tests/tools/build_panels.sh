#!/usr/bin/env bash
# build_panels.sh PAGE.JS: the page that draws a dashboard's panels, with Grafana's components in it (npm; 600 MB for a moment).
set -euo pipefail

page=$(realpath -m "$1")
work=$(mktemp -d "$(dirname "$page")/build.XXXXXX")
trap 'rm -rf "$work"' EXIT
cp "$(dirname "$0")"/../dashboards/render/* "$work"
cd "$work"
npm ci --no-audit --no-fund --loglevel=error --ignore-scripts
node build.mjs "$page"
