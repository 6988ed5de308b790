"""Tests with real mpirun: Open MPI 4 and 5, and MPICH."""
