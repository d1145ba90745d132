#!/usr/bin/env bash
# Makes .venv-ray, in which Ray Train runs, and runs its tests. Arguments go to pytest.
# Ray is large, and starts some twenty processes for two workers, so it is not among the others.
set -euo pipefail
cd "$(dirname "$0")/../.."

packages=("torch==${TORCH:-2.13.0}" 'ray[train]==2.60.0' numpy pytest)
env=.venv-ray
inputs="$PWD ${packages[*]}"
if [[ "$(cat $env/.inputs 2>/dev/null)" != "$inputs" ]]; then
    rm -rf $env
    "${PYTHON:-python3}" -m venv $env
    "$env/bin/python" -m pip install --quiet --disable-pip-version-check "${packages[@]}"
    echo "$inputs" >$env/.inputs
fi
exec .venv/bin/pytest tests/integration/clients/test_ray.py "$@"
