#!/bin/bash
# train_bert.py on 10 nodes, 2 ranks on each; written by
#     srunddp sbatch --salloc --job-name=bert --partition=torch --nodes=10 --exclude=node07 --ntasks-per-node=2 --cpus-per-task=2 --time=00:30:00 --venv=staged-env --stage --offline --preflight --backend=gloo --env=OMP_NUM_THREADS=2 --verbose --prefix train_bert.py --subset 2000 --epochs 3
# To be started in the folder that its paths are relative to:
#     bash THIS_FILE

set -euo pipefail

# Outside a job: once more, under salloc.
if [ -z "${SLURM_JOB_ID:-}" ]; then
  [ -f "$0" ] || { echo "this script has to be a file: bash FILE" >&2; exit 78; }
  exec salloc \
    --job-name=bert \
    --nodes=10 \
    --ntasks-per-node=2 \
    --cpus-per-task=2 \
    --exclude=node07 \
    --partition=torch \
    --time=00:30:00 \
    bash "$0"
fi

# What its bin/activate does.
export VIRTUAL_ENV="$PWD"/staged-env
export PATH="$VIRTUAL_ENV/bin:$PATH"
unset PYTHONHOME

export OMP_NUM_THREADS=2

# Only srun of Slurm 22.05 and 23.02 needs this, to take over the option of the job.
export SRUN_CPUS_PER_TASK="$SLURM_CPUS_PER_TASK"

mkdir -p -- logs

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
srunddp=$(srunddp stage push --env "$VIRTUAL_ENV" --project "$PWD" --exclude /logs)

# If a node, a network or the environment fails the check, the job ends here with exit code 69.
srun --export=ALL --kill-on-bad-exit=1 --chdir=/ \
  "$srunddp" check --staged --backend=gloo --output-dir=logs train_bert.py

# The first rank that fails ends the others.
srun --export=ALL --kill-on-bad-exit=1 --chdir=/ \
  "$srunddp" run --staged --backend=gloo --offline --prefix --verbose \
  train_bert.py --subset 2000 --epochs 3
