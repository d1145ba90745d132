#!/usr/bin/env bash
# The main job: sets up .venv if need be, then trains. Arguments go to `fsdp-overlap train`.
set -euo pipefail
root="$(cd "$(dirname "$0")/.." && pwd)"
"$root/scripts/setup.sh"
exec "$root/.venv/bin/fsdp-overlap" train "$@"
