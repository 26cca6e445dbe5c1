#!/bin/bash
# Train on two nodes without a scheduler. Run the same command on each, from the same folder of a
# file system that both share.
#
#   HEAD=node-a OUT=runs/vit examples/two_nodes.sh train/vit.py --data /data/imagenet
#
# HEAD is the name or address of one of the two nodes, and OUT is the run's folder. Pass the flags of
# the script, except --out and --resume. The same command on both continues a run that was stopped.
set -eu
: "${HEAD:?must be the name or address of one of the nodes, the same on both}"
: "${OUT:?must be the folder of the run, on a file system that both nodes share}"

# Without this, a restart with a new node fails or finds addresses of the previous attempt.
export TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1
# torchrun uses the id as the name of a folder, so it must not contain slashes.
# RANKS is the number of processes per node (default: one per GPU). PORT is an open port of HEAD.
exec torchrun \
    --nnodes="${NODES:-2}" --nproc-per-node="${RANKS:-gpu}" --max-restarts=3 \
    --rdzv-backend=c10d --rdzv-endpoint="$HEAD:${PORT:-29500}" --rdzv-id="${OUT//\//-}" \
    "$@" --out "$OUT" --resume auto
