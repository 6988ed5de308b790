"""Job scripts: what is wished, as a typed value, and the shell script that does it."""
