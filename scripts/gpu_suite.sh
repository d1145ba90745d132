#!/usr/bin/env bash
# What one GPU can tell: correctness, memory, overlap and speed. Arguments go to bench/gpu_suite.py.
set -euo pipefail
root="$(cd "$(dirname "$0")/.." && pwd)"
# A Python that has all it takes is used as it is, since a machine with a GPU may have no network.
for python in "$root/.venv/bin/python" "${PYTHON:-python3}"; do
    if "$python" -c 'import sys, pytest, torch; assert sys.version_info >= (3, 11)' 2>/dev/null; then
        exec "$python" "$root/scripts/bench/gpu_suite.py" "$@"
    fi
done
"$root/scripts/setup.sh"
exec "$root/.venv/bin/python" "$root/scripts/bench/gpu_suite.py" "$@"
