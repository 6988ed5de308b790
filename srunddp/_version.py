"""srunddp's version; setup.py reads it too."""

__version__ = "0.2.0.dev0"
