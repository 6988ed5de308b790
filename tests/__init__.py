"""The test suite; `bin/test` sets up what it needs."""
