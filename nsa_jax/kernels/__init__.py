"""The implementations of the operations, each in its own folder, and what they share."""
