#!/bin/bash
# train.py on 1 node, 4 ranks; written by
#     srunddp sbatch --nodes=1 --gres=gpu:4 --cpus-per-task=8 --venv=.venv train.py
# To be started in the folder that its paths are relative to:
#     mkdir -p -- logs && sbatch THIS_FILE

#SBATCH --job-name=train
#SBATCH --nodes=1
# One rank takes one GPU, and sees all of its node: bound to one, it could not use NVLink.
#SBATCH --ntasks-per-node=4
#SBATCH --cpus-per-task=8
#SBATCH --gres=gpu:4
# Slurm does not make this folder; if it is missing the job ends at once, without a message.
#SBATCH --output=logs/%x-%j.out
# Each start appends to the log of the one before.
#SBATCH --open-mode=append

set -euo pipefail

# What its bin/activate does.
export VIRTUAL_ENV="$PWD"/.venv
export PATH="$VIRTUAL_ENV/bin:$PATH"
unset PYTHONHOME

# Only srun of Slurm 22.05 and 23.02 needs this, to take over the option of the job.
export SRUN_CPUS_PER_TASK="$SLURM_CPUS_PER_TASK"

# The first rank that fails ends the others.
srun --export=ALL --kill-on-bad-exit=1 --gpu-bind=none \
  srunddp run train.py
