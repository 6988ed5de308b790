"""Benchmarks: ratios of srunddp to its peers, measured in turn in one run by ``bin/bench``; none of
them is a test.
"""
