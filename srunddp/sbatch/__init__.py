"""Job scripts: what is requested, as a typed value, and the shell script that does it."""
