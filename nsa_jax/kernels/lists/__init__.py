"""The selection in the forms that kernels loop over, made by small Triton kernels.

`unions` merges the blocks of neighbouring queries, `ring` cuts such a list up for the warpgroups of a
program, `items` inverts the selection. Triton and Pallas kernels take their lists from here.
"""
