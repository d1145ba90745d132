#!/usr/bin/env bash
# Kills a training run again and again, resumes it each time, and compares it with one that was left alone.
set -euo pipefail
root="$(cd "$(dirname "$0")/.." && pwd)"
"$root/scripts/setup.sh"
exec "$root/.venv/bin/python" "$root/scripts/check_resume.py" "$@"
