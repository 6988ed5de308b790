#!/bin/bash
# train.py on 2 nodes, 4 ranks on each; written by
#     srunddp sbatch --nodes=2 --gpus-per-node=4 --cpus-per-task=8 --time=04:00:00 '--container-image=registry.example.org#team/train:1' --container-mounts=/scratch/data:/data:ro train.py --data-dir /data
# To be started in the folder that its paths are relative to:
#     mkdir -p -- logs && sbatch THIS_FILE

#SBATCH --job-name=train
#SBATCH --nodes=2
# One rank takes one GPU, and sees all of its node: bound to one, it could not use NVLink.
#SBATCH --ntasks-per-node=4
#SBATCH --cpus-per-task=8
#SBATCH --gpus-per-node=4
#SBATCH --time=04:00:00
# Slurm does not make this folder; if it is missing the job ends at once, without a message.
#SBATCH --output=logs/%x-%j.out
# Each start appends to the log of the one before.
#SBATCH --open-mode=append

set -euo pipefail

unset VIRTUAL_ENV  # that of the shell that submitted this job

# Only srun of Slurm 22.05 and 23.02 needs this, to take over the option of the job.
export SRUN_CPUS_PER_TASK="$SLURM_CPUS_PER_TASK"

# The first rank that fails ends the others.
srun --export=ALL --kill-on-bad-exit=1 --gpu-bind=none \
  --container-image='registry.example.org#team/train:1' \
  --container-mounts="$PWD:$PWD",/scratch/data:/data:ro --container-workdir="$PWD" \
  srunddp run train.py --data-dir /data
