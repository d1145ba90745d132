#!/usr/bin/env bash
# Sets up .venv if need be, then lint, types and tests. Without arguments, all tests, on several cores
# at once; else the arguments go to pytest.
set -euo pipefail
cd "$(dirname "$0")/.."
scripts/setup.sh
bin=.venv/bin
"$bin/ruff" check .
"$bin/ruff" format --check .
"$bin/mypy"
if (($#)); then
    exec "$bin/pytest" "$@"
fi
# Each worker has a pool of up to four ranks, so more workers than these need much memory.
"$bin/pytest" -n auto --maxprocesses 4 --dist loadfile -m "not alone"
# Only files that name the mark, because it takes long to import them all.
mapfile -t alone < <(grep -rl "mark\.alone" tests --include="test_*.py")
exec "$bin/pytest" -m alone "${alone[@]}"
