"""The report on a monitored run: reads its files, computes figures, judges them, and writes text
and a page with charts.
"""
