#!/bin/bash
# train.py on 2 nodes, 4 ranks on each; written by
#     srunddp sbatch --job-name=two_nodes --partition=gpu --nodes=2 --gres=gpu:4 --cpus-per-task=8 --time=24:00:00 --module-purge --modules=Python/3.10 --modules=CUDA/11.7 --modules=NCCL --venv=.venv --env=NCCL_NET=IB --env=NCCL_DEBUG=INFO --env=NCCL_NET_GDR_LEVEL=5 --monitor=5 train.py --data-dir path/to/your/dataset --batch-size 64 --epochs 3 --num-workers 8
# To be started in the folder that its paths are relative to:
#     mkdir -p -- logs && sbatch THIS_FILE

#SBATCH --job-name=two_nodes
#SBATCH --nodes=2
# One rank takes one GPU, and sees all of its node: bound to one, it could not use NVLink.
#SBATCH --ntasks-per-node=4
#SBATCH --cpus-per-task=8
#SBATCH --gres=gpu:4
#SBATCH --partition=gpu
#SBATCH --time=24:00:00
# Slurm does not make this folder; if it is missing the job ends at once, without a message.
#SBATCH --output=logs/%x-%j.out
# Each start appends to the log of the one before.
#SBATCH --open-mode=append

set -euo pipefail

# What follows may read variables that are not set.
set +u
module purge
module load Python/3.10 CUDA/11.7 NCCL
set -u

# What its bin/activate does.
export VIRTUAL_ENV="$PWD"/.venv
export PATH="$VIRTUAL_ENV/bin:$PATH"
unset PYTHONHOME

export NCCL_NET=IB
export NCCL_DEBUG=INFO
export NCCL_NET_GDR_LEVEL=5

# Only srun of Slurm 22.05 and 23.02 needs this, to take over the option of the job.
export SRUN_CPUS_PER_TASK="$SLURM_CPUS_PER_TASK"

# Slurm's SIGTERM comes to this shell, too: it waits for the ranks, which may be writing a checkpoint.
ended=
trap ended=yes TERM

# The first rank that fails ends the others.
code=0
srun --export=ALL --kill-on-bad-exit=1 --gpu-bind=none \
  srunddp run --monitor=5 --monitor-dir=logs \
  train.py --data-dir path/to/your/dataset --batch-size 64 --epochs 3 --num-workers 8 || code=$?

# If Slurm ends the job there is no time for a report: the same command writes it later.
if [ -z "$ended" ]; then
  timeout --foreground 120 srunddp report "$SLURM_JOB_ID" --monitor-dir=logs || true
fi
exit "$code"
