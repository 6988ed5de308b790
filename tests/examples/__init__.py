"""Promises of docs/examples that need no cluster."""
