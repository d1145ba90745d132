#!/usr/bin/env bash
# Makes .venv-torchft, in which torchft runs, and runs its test. Arguments go to pytest.
set -euo pipefail
cd "$(dirname "$0")/../.."

packages=("torch==${TORCH:-2.13.0}" 'torchft-nightly==2026.10.26' numpy)
env=.venv-torchft
inputs="$PWD ${packages[*]}"
if [[ "$(cat $env/.inputs 2>/dev/null)" != "$inputs" ]]; then
    rm -rf $env
    "${PYTHON:-python3}" -m venv $env
    "$env/bin/python" -m pip install --quiet --disable-pip-version-check "${packages[@]}"
    echo "$inputs" >$env/.inputs
fi
exec .venv/bin/pytest tests/integration/clients/test_torchft.py "$@"
