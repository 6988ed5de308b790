"""Runs ``python -m srunddp`` as the command ``srunddp``."""

from srunddp.cli import main

if __name__ == "__main__":
    main(prog_name="srunddp")
