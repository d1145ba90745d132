#!/usr/bin/env bash
# Makes .venv-torchtitan, in which torchtitan runs, and runs its tests. Arguments go to pytest.
# torchtitan 0.3.0 needs torch 2.14 or newer, which takes 6 GB with its libraries for CUDA.
set -euo pipefail
cd "$(dirname "$0")/../.."

packages=(
    "torch==${TORCH:-2.14.1}" spmd_types==0.2.3 torch_checkpointing torchdata 'datasets>=3.6,<4.8'
    tokenizers safetensors tyro einops tensorboard numpy
)
env=.venv-torchtitan
inputs="$PWD torchtitan==0.3.0 ${packages[*]}"
if [[ "$(cat $env/.inputs 2>/dev/null)" != "$inputs" ]]; then
    rm -rf $env
    "${PYTHON:-python3}" -m venv $env
    pip=("$env/bin/python" -m pip install --quiet --disable-pip-version-check)
    "${pip[@]}" "${packages[@]}"
    "${pip[@]}" --no-deps torchtitan==0.3.0 # it starts without the others that it names
    echo "$inputs" >$env/.inputs
fi
exec .venv/bin/pytest tests/integration/clients/test_torchtitan.py "$@"
