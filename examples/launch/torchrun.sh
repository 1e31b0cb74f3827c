#!/usr/bin/env bash
# On every machine: examples/launch/torchrun.sh HOST MACHINES DEVICES [options of the script]
# HOST is the name or address of one of the machines; DEVICES are those of each.
set -euo pipefail
host="$1" machines="$2" devices="$3"
shift 3
exec torchrun --nnodes "$machines" --nproc-per-node "$devices" \
  --rdzv-backend c10d --rdzv-endpoint "$host:29500" \
  "$(dirname "$0")/../bring_your_own_module.py" --nodes "$machines" --devices "$devices" "$@"
