#!/usr/bin/env bash
# Makes .venv from the exact pins, when it is missing or they changed. Needs Python 3.11 or newer and pip.
set -euo pipefail
cd "$(dirname "$0")/.."
pins=requirements/cpu.txt
python=${PYTHON:-python3}
want=$(cat "$pins" tools/setup.sh pyproject.toml | sha256sum | cut -d' ' -f1)
[ "$(cat .venv/pins.sha256 2>/dev/null)" = "$want" ] && exit 0

"$python" -c 'import sys; sys.exit(sys.version_info < (3, 11))' ||
    { echo "setup: $("$python" --version) is too old; install Python 3.11 or newer, or name one: make PYTHON=python3.12 ..." >&2; exit 1; }
command -v c++ >/dev/null || { echo "setup: no C++ compiler on PATH; install g++ (Debian: apt-get install g++)" >&2; exit 1; }

echo "setup: installing $(grep -c '==' "$pins") pinned packages into .venv (once; a few minutes)"
log=$(mktemp)
trap 'rm -f "$log"' EXIT
attempt() { "$@" >>"$log" 2>&1 || { tail -n 25 "$log" >&2; echo "setup: '$*' failed; see above, then run the same make again" >&2; exit 1; }; }
rm -rf .venv
attempt "$python" -m venv .venv
# torch with its own dependencies first: the CPU build where one is offered, else the CUDA build with its libraries.
attempt .venv/bin/python -m pip install --disable-pip-version-check -c "$pins" "$(grep '^torch==' "$pins")" "$(grep '^setuptools==' "$pins")"
attempt .venv/bin/python -m pip install --disable-pip-version-check --no-deps -r "$pins"
attempt .venv/bin/python -m pip install --disable-pip-version-check --no-deps --no-build-isolation -e .
echo "$want" >.venv/pins.sha256
