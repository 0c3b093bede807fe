#!/usr/bin/env bash
# Plays a newcomer on a new machine: with empty caches it clones the last commit into a new folder without .venv, types
# README's two commands, builds the site, and runs every block of README, site and tutorials as printed. Prints the
# seconds of each part.
#
# tools/bench/newcomer.sh [FOLDER]
set -euo pipefail
source=$(cd "$(dirname "$0")/../.." && pwd)
given=${1:-$(mktemp -d)}
[ -n "${IS_NEWCOMER:-}" ] || IS_NEWCOMER=1 exec "$source/tools/bench/new_machine.sh" "$0" "$given"
folder=$given/megatron_rl
git clone --quiet "$source" "$folder"
cd "$folder"
timed() {
    local start=$SECONDS
    "$@" >"$folder.log" 2>&1 || { tail -n 40 "$folder.log" >&2; echo "newcomer: '$*' failed" >&2; exit 1; }
    echo "$((SECONDS - start)) s  $*"
}
timed make setup
timed make demo
timed make test
timed make docs
timed .venv/bin/python -m pytest tests/e2e/test_pages.py tests/e2e/test_tutorials.py --all
echo "newcomer: all of it worked in $SECONDS s, in $folder"
