#!/bin/bash
# train_gloo.py on 6 nodes, 1 rank on each; written by
#     srunddp sbatch --job-name=gloo --nodes=6 '--nodelist=master-node,node[01-05]' --backend=gloo --ifaces=etc/ifaces.conf train_gloo.py
# To be started in the folder that its paths are relative to:
#     mkdir -p -- logs && sbatch THIS_FILE

#SBATCH --job-name=gloo
#SBATCH --nodes=6
#SBATCH --ntasks-per-node=1
#SBATCH --nodelist=master-node,node[01-05]
# Slurm does not make this folder; if it is missing the job ends at once, without a message.
#SBATCH --output=logs/%x-%j.out
# Each start appends to the log of the one before.
#SBATCH --open-mode=append

set -euo pipefail

# The first rank that fails ends the others.
srun --export=ALL --kill-on-bad-exit=1 \
  srunddp run --backend=gloo --ifaces=etc/ifaces.conf \
  train_gloo.py
