"""What the files of a monitored run say: read, summed up, judged, and shown as text, pictures and a page."""
