#!/bin/bash
# train.py on 4 nodes, 1 rank on each; written by
#     srunddp sbatch --job-name=four_gpus --nodes=4 --gres=gpu:1 --cpus-per-task=16 --time=0-04:00:00 --modules=cuda/11.6 --modules=gcc/10.3 --modules=python/3.9 train.py
# To be started in the folder that its paths are relative to:
#     mkdir -p -- logs && sbatch THIS_FILE

#SBATCH --job-name=four_gpus
#SBATCH --nodes=4
# One rank takes one GPU, and sees all of its node: bound to one, it could not use NVLink.
#SBATCH --ntasks-per-node=1
#SBATCH --cpus-per-task=16
#SBATCH --gres=gpu:1
#SBATCH --time=0-04:00:00
# Slurm does not make this folder; if it is missing the job ends at once, without a message.
#SBATCH --output=logs/%x-%j.out
# Each start appends to the log of the one before.
#SBATCH --open-mode=append

set -euo pipefail

# What follows may read variables that are not set.
set +u
module load cuda/11.6 gcc/10.3 python/3.9
set -u

# Only srun of Slurm 22.05 and 23.02 needs this, to take over the option of the job.
export SRUN_CPUS_PER_TASK="$SLURM_CPUS_PER_TASK"

# The first rank that fails ends the others.
srun --export=ALL --kill-on-bad-exit=1 --gpu-bind=none \
  srunddp run train.py
