"""Job scripts: a typed description of the job, and the shell script that is written from it."""
