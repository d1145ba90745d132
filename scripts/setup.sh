#!/usr/bin/env bash
# Makes .venv with the versions that the project is tested with. Does nothing while its inputs are unchanged.
set -euo pipefail
cd "$(dirname "$0")/.."

# The path is an input too: scripts in .venv/bin and the editable install both name it.
inputs="$({ pwd; cat pyproject.toml constraints.txt; } | cksum)"
if [[ -x .venv/bin/python && "$(cat .venv/.inputs 2>/dev/null)" == "$inputs" ]]; then
    exit 0
fi

python=""
for candidate in ${PYTHON:-python3 python3.13 python3.12 python3.11}; do
    # Run it: a name on the PATH may be a stub that starts nothing.
    if "$candidate" -c 'import sys, venv; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then
        python="$candidate"
        break
    fi
done
if [[ -z "$python" ]]; then
    echo "error: no Python >= 3.11 with venv found on the PATH; install one, or name it: PYTHON=/path/to/python3 $0" >&2
    exit 1
fi

echo "setting up .venv with $("$python" --version)" >&2
rm -rf .venv
if "$python" -c 'import ensurepip' 2>/dev/null; then
    "$python" -m venv .venv
else # some distributions ship pip without ensurepip
    "$python" -m venv --without-pip .venv
    "$python" -m pip --python .venv/bin/python install --quiet pip
fi
.venv/bin/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[dev]'
echo "$inputs" >.venv/.inputs
