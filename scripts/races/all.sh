#!/usr/bin/env bash
# What `fsdp-overlap races` finds, in three tables: right programs, published faults of libraries, and
# waits of libraries that are left out. `scripts/races/all.sh FOLDER` keeps environments of other
# releases in FOLDER; everything takes about an hour.
set -uo pipefail
here=$(dirname "$0")
folder=${1:?name a folder for environments}
python=$here/../../.venv/bin/python
status=0
"$python" "$here/right.py" || status=1
"$python" "$here/published.py" "$folder" || status=1
"$python" "$here/planted.py" fsdp2 || status=1
"$python" "$here/planted.py" megatron-fsdp || status=1
exit $status
