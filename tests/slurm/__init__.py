"""Tests on the real Slurm cluster."""
