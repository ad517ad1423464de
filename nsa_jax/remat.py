"""Names for rematerialisation: which results of the forward pass a policy may keep for the backward pass."""

# They stand here because the module of the kernels imports Triton, and a model's code has to run without it.
OUT, LSE, BLOCK_INDICES, LOSS_GRADIENTS = "nsa_out", "nsa_lse", "nsa_block_indices", "nsa_selection_gradients"
SAVED_NAMES = OUT, LSE, BLOCK_INDICES, LOSS_GRADIENTS
"""Names, for `jax.checkpoint_policies.save_only_these_names`, of what the forward pass of the Triton kernels
leaves for the backward pass: output and log-sum-exp of each branch, and the selected blocks; and of the
gradients that a selection loss forms beside itself. With these kept, no forward kernel runs twice. On `xla`
only the gradients have their name."""
