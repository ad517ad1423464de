"""Kernels of a decode step: few new tokens, a cache, and nothing but bytes to wait for."""
