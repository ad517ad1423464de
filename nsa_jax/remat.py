"""Names for rematerialisation: which results of the forward pass a policy may keep for the backward pass."""

# What the forward pass of the Triton kernels leaves for the backward pass: output and log-sum-exp of each
# branch, and the selected blocks. They stand here because the module of the kernels imports Triton, and a
# model's code has to run without it; a test holds the two lists together. On `xla` nothing has these names.
SAVED_NAMES = ("nsa_out", "nsa_lse", "nsa_block_indices")
