#!/usr/bin/env bash
# The bench and rows of the papers' tables on a GPU, the most valuable first, some ten minutes a call:
#
#     benchmarks/gpu.sh OUT DATA [PREVIOUS]
#
# OUT gets at most eight files below 16 MiB. DATA is the folder of images (ATOLL_DATA). PREVIOUS is what an earlier
# call left in OUT: it goes on from there, on a GPU of the same kind. Nothing is installed and no network is needed:
# Atoll runs from this source tree, and Python packages that are not there may lie as pure wheels in the folder $WHEELS.
#
# More from the environment: PYTHON (python3), ATOLL_GPU_SECONDS (560, then it stops cleanly and packs),
# ATOLL_GPU_WORK (a folder that outlives the call, if there is one), ATOLL_GPU_DEVICE (cuda), ATOLL_GPU_SCALE
# (full; test: on a CPU in minutes), ATOLL_GPU_PLAN (benchmarks/gpu/plan.toml).
set -euo pipefail
started=$(date +%s)
if [ $# -lt 2 ] || [ $# -gt 3 ]; then
    sed -n '2,14s/^# \{0,1\}//p' "$0" >&2
    exit 2
fi
root=$(cd "$(dirname "$0")/.." && pwd)
path="$root/src"
for wheel in "${WHEELS:-}"/*.whl; do
    if [ -n "${WHEELS:-}" ] && [ -e "$wheel" ]; then path="$path:$(realpath "$wheel")"; fi
done
export PYTHONPATH="$path${PYTHONPATH:+:$PYTHONPATH}"
export ATOLL_DATA
ATOLL_DATA=$(realpath "$2")
"${PYTHON:-python3}" "$root/benchmarks/gpu/packages.py" "$root/pyproject.toml"
exec "${PYTHON:-python3}" "$root/benchmarks/gpu/session.py" "$1" --started "$started" ${3:+--previous "$3"}
