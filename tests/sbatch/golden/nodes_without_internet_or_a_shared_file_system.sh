#!/bin/bash
# docs/examples/mnist.py on 2 nodes, 8 ranks on each; written by
#     srunddp sbatch --nodes=2 --gpus-per-node=8 --cpus-per-task=8 --time=04:00:00 --requeue --venv=.venv --stage --data=/datasets/mnist --stage-exclude=runs --offline --preflight docs/examples/mnist.py --data-dir=/datasets/mnist --output-dir=runs/first --resume=auto
# To be started in the folder that its paths are relative to:
#     mkdir -p -- logs && sbatch THIS_FILE

#SBATCH --job-name=mnist
#SBATCH --nodes=2
# One rank takes one GPU, and sees all of its node: bound to one, it could not use NVLink.
#SBATCH --ntasks-per-node=8
#SBATCH --cpus-per-task=8
# The ranks get this signal some seconds before the time limit, and write a checkpoint.
#SBATCH --signal=USR2@120
#SBATCH --gpus-per-node=8
#SBATCH --time=04:00:00
# Slurm does not make this folder; if it is missing the job ends at once, without a message.
#SBATCH --output=logs/%x-%j.out
# Slurm may start the job again, under its number.
#SBATCH --requeue
# Each start appends to the log of the one before.
#SBATCH --open-mode=append

set -euo pipefail

# What its bin/activate does.
export VIRTUAL_ENV="$PWD"/.venv
export PATH="$VIRTUAL_ENV/bin:$PATH"
unset PYTHONHOME

# Only srun of Slurm 22.05 and 23.02 needs this, to take over the option of the job.
export SRUN_CPUS_PER_TASK="$SLURM_CPUS_PER_TASK"

# Slurm's SIGTERM comes to this shell, too: it waits for the ranks, which may be writing a checkpoint.
ended=
trap ended=yes TERM
clean_up() {
  trap - EXIT
  [ -n "$ended" ] || srunddp stage clean || true
}
trap clean_up EXIT

# To nodes that do not see them; prints the srunddp that every node has. That enters this folder or its copy,
# since not all nodes could start here: so --chdir=/ below.
srunddp=$(srunddp stage push --env "$VIRTUAL_ENV" --project "$PWD" --data /datasets/mnist --exclude /logs --exclude runs)

# If a node, a network or the environment fails the check, the job ends here with exit code 69.
srun --export=ALL --kill-on-bad-exit=1 --chdir=/ --gpu-bind=none \
  "$srunddp" check --staged --output-dir=logs docs/examples/mnist.py

# The first rank that fails ends the others.
code=0
srun --export=ALL --kill-on-bad-exit=1 --chdir=/ --gpu-bind=none \
  "$srunddp" run --staged --offline \
  docs/examples/mnist.py --data-dir=/datasets/mnist --output-dir=runs/first --resume=auto || code=$?

# 143: there is a checkpoint, and Slurm is about to end the job. Slurm before 24.05 takes a preempted job
# that ends by itself for done. Later versions requeue it; if it waits, they may requeue it twice.
slurm=$(srun --version || true)
requeues=24.05
if [ "$code" = 143 ] && [ -z "$ended" ] && [[ ${slurm##* } < $requeues ]]; then
  clean_up
  sleep 600 || true
fi
exit "$code"
