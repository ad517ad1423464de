"""The implementations of the operations, each in its own folder."""
