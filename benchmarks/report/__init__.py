"""One command that proves a machine: `python -m benchmarks.report`."""
