"""The implementations of the operations, one folder each."""
