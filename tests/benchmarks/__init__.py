"""Benchmarks: ratios within one run, started by hand; none of them is a test."""
