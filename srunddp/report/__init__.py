"""What the files of a monitored run say: read, summed up, judged, and shown as text and as a page
with charts.
"""
