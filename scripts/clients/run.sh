#!/usr/bin/env bash
# Makes an environment for a client that is too heavy for .venv, .venv-ray for example, and runs its tests.
# Arguments after the client's name go to pytest.
set -euo pipefail
cd "$(dirname "$0")/../.."

client="${1-}"
alone=() # installed without what it names
case "$client" in
    ray) # large, and starts some twenty processes for two workers
        packages=("torch==${TORCH:-2.13.0}" 'ray[train]==2.60.0' numpy pytest)
        ;;
    torchft)
        packages=("torch==${TORCH:-2.13.0}" 'torchft-nightly==2026.10.26' numpy)
        ;;
    torchtitan) # needs torch 2.14 or newer, which takes 6 GB with its libraries for CUDA
        packages=(
            "torch==${TORCH:-2.14.1}" spmd_types==0.2.3 torch_checkpointing torchdata 'datasets>=3.6,<4.8'
            tokenizers safetensors tyro einops tensorboard numpy
        )
        alone=(torchtitan==0.3.0) # it starts without the others that it names
        ;;
    *)
        echo "usage: [TORCH=VERSION] $0 ray|torchft|torchtitan [ARGUMENTS OF PYTEST]" >&2
        exit 2
        ;;
esac
env=".venv-$client"
inputs="$PWD ${packages[*]} ${alone[*]}"
if [[ "$(cat "$env/.inputs" 2>/dev/null)" != "$inputs" ]]; then
    rm -rf "$env"
    "${PYTHON:-python3}" -m venv "$env"
    pip=("$env/bin/python" -m pip install --quiet --disable-pip-version-check)
    "${pip[@]}" "${packages[@]}"
    if ((${#alone[@]})); then
        "${pip[@]}" --no-deps "${alone[@]}"
    fi
    echo "$inputs" >"$env/.inputs"
fi
exec .venv/bin/pytest "tests/integration/clients/test_$client.py" "${@:2}"
