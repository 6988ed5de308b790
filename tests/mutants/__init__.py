"""Random small changes of the product, to see whether the tests notice: ``python -m tests.mutants
N``.
"""
