#!/bin/bash
# train.py on 8 ranks; written by
#     srunddp mpirun --hosts=a:4,b:4 --gpus-per-node=4 --venv=.venv --env=NCCL_DEBUG=WARN train.py --epochs=10
# To be started in the folder that its paths are relative to:
#     bash THIS_FILE

set -euo pipefail

# What its bin/activate does.
export VIRTUAL_ENV="$PWD"/.venv
export PATH="$VIRTUAL_ENV/bin:$PATH"
unset PYTHONHOME

export NCCL_DEBUG=WARN

# For the other hosts, where mpirun starts the ranks by ssh. It complains of one that is not set.
export LD_LIBRARY_PATH="${LD_LIBRARY_PATH:-}"

# --bind-to none: a rank needs CPUs for its loader workers, and Open MPI would give it one.
mpirun -np 8 --host a:4,b:4 --map-by ppr:4:node --bind-to none \
  -x PATH -x LD_LIBRARY_PATH -x VIRTUAL_ENV -x NCCL_DEBUG \
  srunddp run train.py --epochs=10
