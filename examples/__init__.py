"""Programs that use the library; run them from a clone, for example with `python -m examples.recall`."""
