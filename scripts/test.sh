#!/usr/bin/env bash
# Sets up .venv if need be, then lint, types and tests. Without arguments the short run, which takes
# nine and a half minutes on two cores (tests/support/short.py says what it leaves out); with --all
# every test; else the arguments go to pytest.
set -euo pipefail
cd "$(dirname "$0")/.."
scripts/setup.sh
bin=.venv/bin
"$bin/ruff" check .
"$bin/ruff" format --check .
"$bin/mypy"
which=(--short)
if [[ "${*-}" == --all ]]; then
    which=()
elif (($#)); then
    exec "$bin/pytest" "$@"
fi
# One more than there are cores, because tests wait a fifth of their time. Each worker has a pool of up to
# four ranks, so more than four workers need much memory.
workers=$(($(nproc) < 4 ? $(nproc) + 1 : 4))
"$bin/pytest" -n "$workers" --dist loadfile -m "not alone" --rooms "${which[@]}"
# Only files that name the mark, because it takes long to import them all.
mapfile -t alone < <(grep -rl "mark\.alone" tests --include="test_*.py")
exec "$bin/pytest" -m alone "${which[@]}" "${alone[@]}"
