#!/bin/bash
# train.py on 4 nodes, 8 ranks on each; written by
#     srunddp sbatch --nodes=4 --gpus-per-node=8 --cpus-per-task=4 --time=02:00:00 --venv=venv train.py --epochs=10 --batch-size=64 --lr=0.01 --data-dir=./data --checkpoint-dir=./checkpoints
# To be started in the folder that its paths are relative to:
#     mkdir -p -- logs && sbatch THIS_FILE

#SBATCH --job-name=train
#SBATCH --nodes=4
# One rank takes one GPU, and sees all of its node: bound to one, it could not use NVLink.
#SBATCH --ntasks-per-node=8
#SBATCH --cpus-per-task=4
#SBATCH --gpus-per-node=8
#SBATCH --time=02:00:00
# Slurm does not make this folder; if it is missing the job ends at once, without a message.
#SBATCH --output=logs/%x-%j.out
# Each start appends to the log of the one before.
#SBATCH --open-mode=append

set -euo pipefail

# What its bin/activate does.
export VIRTUAL_ENV="$PWD"/venv
export PATH="$VIRTUAL_ENV/bin:$PATH"
unset PYTHONHOME

# Only srun of Slurm 22.05 and 23.02 needs this, to take over the option of the job.
export SRUN_CPUS_PER_TASK="$SLURM_CPUS_PER_TASK"

# The first rank that fails ends the others.
srun --export=ALL --kill-on-bad-exit=1 --gpu-bind=none \
  srunddp run train.py --epochs=10 --batch-size=64 --lr=0.01 --data-dir=./data --checkpoint-dir=./checkpoints
