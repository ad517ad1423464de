"""Kernels of a decode step: few new tokens attend to a cache, so loads and waits decide the time."""
