"""Provides ``srunddp sbatch``, which writes job scripts for Slurm: from a description of a job, or
from a job script that starts another launcher.
"""
