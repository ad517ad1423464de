"""What does one decoded token cost as the sequence grows, in NSA and in dense attention?

`python -m benchmarks.decode` measures the attention step alone (no projections), or with `--layer` a whole
layer: append the new tokens to a cache of `S` tokens with room for 64 steps, compress where a block became
complete, attend. The steps run in one compiled loop, whose body is several layers, each with a cache of its
own; rows of their own have single steps that the host starts one by one. Dense attention runs in the same
loop, and a ratio counts the faster one of ours and `jax.nn.dot_product_attention`. `--csv` adds each branch's
own time and the reads; `benchmarks.decode.summary` draws that.
"""
