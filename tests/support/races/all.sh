#!/usr/bin/env bash
# What `fsdp-overlap races` finds, in three tables: right programs, published faults of libraries, and
# waits of libraries that are left out. Environments of other releases are made on first use, in a
# folder that `--cache FOLDER` names. Torch's examples are cloned, unless `--examples FOLDER` names a
# checkout. Everything takes about half an hour, and longer the first time.
set -uo pipefail
here=$(dirname "$0")
python=$here/../../../.venv/bin/python
cache=()
examples=()
while (($#)); do
    case $1 in
        --cache) cache=("$1" "${2:?name a folder}") ;;
        --examples) examples=("$1" "${2:?name a folder}") ;;
        *)
            echo "usage: $0 [--cache FOLDER] [--examples FOLDER]" >&2
            exit 2
            ;;
    esac
    shift 2
done
status=0
"$python" "$here/right.py" "${cache[@]}" "${examples[@]}" || status=1
"$python" "$here/published.py" "${cache[@]}" || status=1
"$python" "$here/planted.py" fsdp2 "${cache[@]}" || status=1
"$python" "$here/planted.py" megatron-fsdp "${cache[@]}" || status=1
exit $status
