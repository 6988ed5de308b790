#!/bin/bash
# sweep.py on 1 node, 1 rank; written by
#     srunddp sbatch --cpus-per-task=4 --mem=16G --time=01:00:00 --array=0-7%2 --conda=train --backend=gloo sweep.py
# To be started in the folder that its paths are relative to:
#     mkdir -p -- logs && sbatch THIS_FILE

#SBATCH --job-name=sweep
#SBATCH --nodes=1
#SBATCH --ntasks-per-node=1
#SBATCH --cpus-per-task=4
#SBATCH --array=0-7%2
#SBATCH --mem=16G
#SBATCH --time=01:00:00
# Slurm does not make this folder; if it is missing the job ends at once, without a message.
#SBATCH --output=logs/%x-%A_%a.out
# Each start appends to the log of the one before.
#SBATCH --open-mode=append

set -euo pipefail

# What follows may read variables that are not set.
set +u
eval "$("${CONDA_EXE:-conda}" shell.bash hook)"
conda activate train
set -u
unset VIRTUAL_ENV  # that of the shell that submitted this job

# Only srun of Slurm 22.05 and 23.02 needs this, to take over the option of the job.
export SRUN_CPUS_PER_TASK="$SLURM_CPUS_PER_TASK"

# The first rank that fails ends the others.
srun --export=ALL --kill-on-bad-exit=1 \
  srunddp run --backend=gloo \
  sweep.py
