#!/bin/bash
# train.py on 6 nodes, 1 rank on each; written by
#     srunddp sbatch --job-name=nccl --nodes=6 --gpus-per-node=1 '--nodelist=master-node,node[01-05]' --backend=nccl --ifaces=etc/ifaces.conf --env=NCCL_IB_DISABLE=1 --env=NCCL_DEBUG=INFO train.py
# To be started in the folder that its paths are relative to:
#     mkdir -p -- logs && sbatch THIS_FILE

#SBATCH --job-name=nccl
#SBATCH --nodes=6
# One rank takes one GPU, and sees all of its node: bound to one, it could not use NVLink.
#SBATCH --ntasks-per-node=1
#SBATCH --gpus-per-node=1
#SBATCH --nodelist=master-node,node[01-05]
# Slurm does not make this folder; if it is missing the job ends at once, without a message.
#SBATCH --output=logs/%x-%j.out
# Each start appends to the log of the one before.
#SBATCH --open-mode=append

set -euo pipefail

export NCCL_IB_DISABLE=1
export NCCL_DEBUG=INFO

# The first rank that fails ends the others.
srun --export=ALL --kill-on-bad-exit=1 --gpu-bind=none \
  srunddp run --backend=nccl --ifaces=etc/ifaces.conf \
  train.py
