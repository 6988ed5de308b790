#!/bin/bash
# Trains until it is done, however often Slurm ends the job: each attempt goes on from the last one's checkpoint.
#
#     sbatch docs/examples/resume.sh --epochs=200
#
# `srunddp sbatch --requeue` writes such a script for any layout.
#
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=8
#SBATCH --gpus-per-node=8
#SBATCH --cpus-per-task=8
#SBATCH --time=04:00:00
# Slurm may start the job again, under its number; the output of each attempt follows that of the one before.
#SBATCH --requeue
#SBATCH --open-mode=append
# All ranks are warned 120 s before the end. Without this line rank 0 asks Slurm when that is.
#SBATCH --signal=USR2@120

. .venv/bin/activate
# Only srun of Slurm 22.05 and 23.02 needs this, to take over sbatch's option.
export SRUN_CPUS_PER_TASK=$SLURM_CPUS_PER_TASK

# Slurm sends its SIGTERM to this shell, too, which has to wait for the ranks' checkpoint.
trap : TERM

# The same folder in each attempt. To go on with another job, add its folder: --output-dir=runs/NUMBER.
srun --gpu-bind=none srunddp docs/examples/mnist.py --output-dir="runs/$SLURM_JOB_ID" --resume=auto "$@"
code=$?

# 143: Slurm is about to end the job, by its own decision or since it was asked to start it again. Slurm before 24.05
# takes a preempted job that ends by itself for done. Later versions requeue it; if it waits, they may requeue it twice.
slurm=$(srun --version)
requeues=24.05
[ "$code" = 143 ] && [[ ${slurm##* } < $requeues ]] && sleep 600
exit "$code"
