#!/usr/bin/env bash
# Makes .venv from the exact pins, when it is missing or they changed. Needs Python 3.11 or newer and pip.
set -euo pipefail
cd "$(dirname "$0")/.."
pins=requirements/cpu.txt
python=${PYTHON:-python3}
packages=$(cat "$pins" tools/setup.sh | sha256sum | cut -d' ' -f1)
project=$(sha256sum pyproject.toml | cut -d' ' -f1)
have() { [ "$(cat ".venv/$1.sha256" 2>/dev/null)" = "$2" ]; }
have packages "$packages" && have project "$project" && exit 0

"$python" -c 'import sys; sys.exit(sys.version_info < (3, 11))' ||
    { echo "setup: $("$python" --version) is too old; install Python 3.11 or newer, or name one: make PYTHON=python3.12 ..." >&2; exit 1; }
command -v cc >/dev/null || { echo "setup: no C compiler on PATH; install gcc (Debian: apt-get install gcc)" >&2; exit 1; }
command -v c++ >/dev/null || { echo "setup: no C++ compiler on PATH; install g++ (Debian: apt-get install g++)" >&2; exit 1; }

log=$(mktemp)
half=
trap 'rm -f "$log"; [ -z "$half" ] || kill "$half" 2>/dev/null || true' EXIT
attempt() { "$@" >>"$log" 2>&1 || { tail -n 25 "$log" >&2; echo "setup: '$*' failed; see above, then run the same make again" >&2; exit 1; }; }
if ! have packages "$packages"; then
    echo "setup: installing $(grep -c '==' "$pins") pinned packages into .venv (once; a few minutes)"
    rm -rf .venv
    attempt "$python" -m venv .venv
    # torch with its own dependencies first: the CPU build where one is offered, else the CUDA build with its libraries.
    # Bytecode comes at the end, by all cores; pip compiles by one.
    install=(.venv/bin/python -m pip install --disable-pip-version-check --no-compile)
    attempt "${install[@]}" -c "$pins" "$(grep '^torch==' "$pins")" "$(grep '^setuptools==' "$pins")"
    # No package waits for another one (--no-deps), so two processes take half of them each: 59 s in place of 87.
    for i in 0 1; do grep '==' "$pins" | awk "NR % 2 == $i" >".venv/half_$i.txt"; done
    "${install[@]}" --no-deps -r .venv/half_0.txt >>"$log" 2>&1 &
    half=$!
    attempt "${install[@]}" --no-deps -r .venv/half_1.txt
    attempt wait "$half"
    half=
    .venv/bin/python -m compileall -q -j 0 .venv/lib >>"$log" 2>&1 || true # templates of some packages are no Python
    echo "$packages" >.venv/packages.sha256
fi
attempt .venv/bin/python -m pip install --disable-pip-version-check --no-deps --no-build-isolation -e .
echo "$project" >.venv/project.sha256
