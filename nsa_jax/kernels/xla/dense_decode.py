"""A decode step of a dense or window layer in plain JAX: the tokens are written, then the row is attended.

Both kinds are window attention: of a dense layer the window is the capacity.
"""

from nsa_jax import layout
from nsa_jax.array_typing import Array, Float, Int
from nsa_jax.config import NSAConfig
from nsa_jax.kernels.xla import operations
from nsa_jax.layout import DenseCache, FirstKeys, Index, Run, Runs, slots


def dense_decode_step(
    cache: DenseCache,
    query: Float[Array, "B T N H"],
    key: Float[Array, "B T K H"],
    value: Float[Array, "B T K V"],
    num_tokens: Int[Array, " B"] | None,
    window_size: int | None,
    scale: float,
) -> tuple[Float[Array, "B T N V"], DenseCache]:
    """Appends the tokens, then attends from each of them."""
    num_new, window = query.shape[1], cache.ring_window(window_size)
    new = slots.admit(cache.lengths, cache.max_length(window_size), num_new, num_tokens)
    cache = append_dense(cache, key, value, new)
    # Written first and read afterwards, so that XLA need not keep the old arrays beside the new ones.
    arrays: tuple[Array, ...]
    if window is None:
        arrays, first_keys, window = (cache.key, cache.value), FirstKeys(), cache.key.shape[1]
    else:
        first, length = new.start - window + 1, window + num_new - 1
        arrays = tuple(slots.read_ring(x, first, length) for x in (cache.key, cache.value))
        first_keys = FirstKeys(win=Index(first))
    placement = layout.place(
        NSAConfig(window_size=window),
        batch=query.shape[0],
        num_queries=num_new,
        num_keys=cache.max_length(window_size),
        query_positions=Runs((Run(num_new, new.start),), num_queries=new.num_tokens),
        first_keys=first_keys,
    )
    attended = operations.window_attention(query, *arrays, placement, scale)
    return attended.out, cache


def append_dense(cache: DenseCache, key: Array, value: Array, new: slots.Admitted) -> DenseCache:
    """The cache with the admitted tokens; of a chunk longer than a ring, with the last of them."""
    return DenseCache(
        key=slots.write_ring(cache.key, key, new),
        value=slots.write_ring(cache.value, value, new),
        lengths=new.start + new.num_tokens,
        overflowed=cache.overflowed | ~new.fits,
    )
