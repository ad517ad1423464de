"""The `triton` implementation: NVIDIA GPUs of compute capability 8.0 and newer, forward and backward.

`support` says what it can run and imports nothing that may be missing; `operations` are the operations and
import Triton. `docs/kernels.md` describes the kernels, `docs/kernel_log.md` what was tried.
"""
