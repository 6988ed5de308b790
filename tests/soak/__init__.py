"""Long campaigns, run by `bin/test --soak`; their figures are in docs/measurements.md."""
