"""Reports on a monitored run: reads its files, computes and judges figures, and writes text and a
page with charts.
"""
