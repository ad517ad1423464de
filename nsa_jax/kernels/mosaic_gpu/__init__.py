"""The `mosaic_gpu` implementation: Triton's, with gradients and one forward in Pallas for Hopper GPUs.

Warpgroups of a program have roles of their own. `support` says what it can run and imports no Pallas;
`operations` are the operations. All that is Pallas is here; take away the folder and its lines in
`nsa_jax.dispatch`, and the rest runs on.
"""
