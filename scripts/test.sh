#!/usr/bin/env bash
# Sets up .venv if need be, then lint, types and tests. Arguments go to pytest.
set -euo pipefail
cd "$(dirname "$0")/.."
scripts/setup.sh
bin=.venv/bin
"$bin/ruff" check .
"$bin/ruff" format --check .
"$bin/mypy"
exec "$bin/pytest" "$@"
