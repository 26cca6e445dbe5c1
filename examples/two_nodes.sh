#!/bin/bash
# Train on two nodes without a scheduler: the same command on each of them, from the same folder of
# a file system that both have.
#
#   HEAD=node-a OUT=runs/vit examples/two_nodes.sh train/vit.py --data /data/imagenet
#
# HEAD is the name or address of one of the two, OUT the run's folder. The flags are the script's
# own, less --out and --resume. The same command on both continues a run that was stopped.
set -eu
: "${HEAD:?must be the name or address of one of the nodes, the same on both}"
: "${OUT:?must be the folder of the run, on a file system that both nodes share}"

# Otherwise a restart that a new node joins fails, or finds addresses of the attempt before.
export TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1
# torchrun names a folder by the id: it may not have slashes.
# RANKS are the processes of a node, one for each GPU when omitted. PORT is of HEAD, and open.
exec torchrun \
    --nnodes="${NODES:-2}" --nproc-per-node="${RANKS:-gpu}" --max-restarts=3 \
    --rdzv-backend=c10d --rdzv-endpoint="$HEAD:${PORT:-29500}" --rdzv-id="${OUT//\//-}" \
    "$@" --out "$OUT" --resume auto
