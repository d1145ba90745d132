#!/usr/bin/env bash
# Builds sdist and wheel, installs the wheel into a clean environment with the given release of torch,
# and tries it from another folder. With TORCH_FROM=ENV, torch and what else is there come from the
# environment ENV, and nothing large is downloaded. With DIST=FOLDER, the builds are kept there.
set -euo pipefail
cd "$(dirname "$0")/.."

if (($# != 1)); then
    echo "usage: [TORCH_FROM=ENV] [DIST=FOLDER] $0 VERSION_OF_TORCH, as in $0 2.13.0" >&2
    exit 2
fi
wanted="$1"
# Else the sources would be found in place of the wheel.
unset PYTHONPATH
work="$(mktemp -d)"
trap 'rm -rf "$work"' EXIT
dist="${DIST:-$work/dist}"

echo "building" >&2
python3 -m venv "$work/build"
"$work/build/bin/pip" install --quiet --disable-pip-version-check build
# First the sdist, and the wheel from that.
"$work/build/bin/python" -m build --outdir "$dist" . >"$work/build.log" 2>&1 || {
    cat "$work/build.log" >&2
    exit 1
}
wheel="$(find "$dist" -name '*.whl' -newer "$work/build/pyvenv.cfg")"
[[ -f "$wheel" ]] || { echo "error: not one wheel in $dist: $wheel" >&2; exit 1; }
basename "$wheel" >&2

# What git has of the package is what the wheel has of it.
if git rev-parse --git-dir >/dev/null 2>&1; then
    git ls-files fsdp_overlap | sort >"$work/in_git"
    "$work/build/bin/python" -m zipfile -l "$wheel" | awk '$1 ~ /^fsdp_overlap\// {print $1}' | sort >"$work/in_wheel"
    diff "$work/in_git" "$work/in_wheel" || { echo "error: the wheel has other files than git" >&2; exit 1; }
fi

echo "installing beside torch $wanted" >&2
base=python3
if [[ -n "${TORCH_FROM:-}" ]]; then
    base="$(realpath -s "$TORCH_FROM")/bin/python"
fi
"$base" -m venv "$work/env"
python="$work/env/bin/python"
if [[ -n "${TORCH_FROM:-}" ]]; then
    # As a path alone: what is installed there in editable form is not found by it.
    "$base" -c 'import sysconfig; print(sysconfig.get_path("purelib"))' \
        >"$("$python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/torch_from.pth"
fi
pip=("$work/env/bin/pip" install --quiet --disable-pip-version-check)
"${pip[@]}" "$wheel" "torch==$wanted"

echo "trying it" >&2
mkdir "$work/elsewhere"
cd "$work/elsewhere"
cat >step.py <<'PYTHON'
import sys

import torch
import torch.distributed as dist

import fsdp_overlap
from fsdp_overlap import FsdpContext, fully_shard
from fsdp_overlap.tools.simulator import Device, Fabric

assert fsdp_overlap.__file__.startswith(sys.prefix), fsdp_overlap.__file__
assert torch.__version__.split("+")[0] == sys.argv[1], torch.__version__
assert Device.read("h100_sxm") and Fabric.read("nvlink4_400g")

dist.init_process_group("gloo")
torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Tanh(), torch.nn.Linear(8, 8))
ctx = FsdpContext(dist.init_device_mesh("cpu", (2,)))
fully_shard(model[0], ctx)
fully_shard(model, ctx)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
losses = []
for _ in range(2):
    loss = model(torch.ones(2, 8)).square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    losses.append(loss.item())
assert losses[1] < losses[0], losses
assert ctx.stats.all_gathers > 0
dist.destroy_process_group()
PYTHON
export GLOO_SOCKET_IFNAME="${GLOO_SOCKET_IFNAME:-lo}"
OMP_NUM_THREADS=1 "$python" -m torch.distributed.run --standalone --nproc-per-node 2 step.py "$wanted"
"${pip[@]}" "${wheel}[cli]" "torch==$wanted"
"$work/env/bin/fsdp-overlap" doctor --timeout 300
echo "the wheel works with torch $wanted" >&2
