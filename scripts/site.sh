#!/usr/bin/env bash
# Builds the documentation as a site, in build/site. `scripts/site.sh serve` shows it while it is written.
# Makes .venv-site first, if need be. Warnings, such as a link that leads nowhere, are errors.
set -euo pipefail
cd "$(dirname "$0")/.."

env=.venv-site
inputs="$({ pwd; cat scripts/site/requirements.txt; } | cksum)"
if [[ "$(cat $env/.inputs 2>/dev/null)" != "$inputs" ]]; then
    rm -rf $env
    "${PYTHON:-python3}" -m venv $env
    "$env/bin/python" -m pip install --quiet --disable-pip-version-check -r scripts/site/requirements.txt
    echo "$inputs" >$env/.inputs
fi
export NO_MKDOCS_2_WARNING=1 # of another program, which the pinned versions do not need
# Without --quiet, which hides warnings from --strict too.
exec "$env/bin/python" -m mkdocs "${@:-build}" --strict -f scripts/site/mkdocs.yml
