"""Writes job scripts: a typed description of the job, and the shell script made from it."""
