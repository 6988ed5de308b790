#!/bin/bash
# train.py on 6 ranks; written by
#     srunddp mpirun --mpi=mpich --hostfile=hosts --nodes=3 --ntasks-per-node=2 --venv=.venv --backend=gloo train.py
# To be started in the folder that its paths are relative to:
#     bash THIS_FILE

set -euo pipefail

# What its bin/activate does.
export VIRTUAL_ENV="$PWD"/.venv
export PATH="$VIRTUAL_ENV/bin:$PATH"
unset PYTHONHOME

# For the other hosts, where mpirun starts the ranks by ssh. It complains of one that is not set.
export LD_LIBRARY_PATH="${LD_LIBRARY_PATH:-}"

# -bind-to none: a rank needs CPUs for its loader workers.
mpirun -n 6 -f hosts -ppn 2 -bind-to none \
  -genv PATH "$PATH" -genv LD_LIBRARY_PATH "$LD_LIBRARY_PATH" -genv VIRTUAL_ENV "$VIRTUAL_ENV" \
  srunddp run --backend=gloo \
  train.py
