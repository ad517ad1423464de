"""Native Sparse Attention of rows whose tokens lie on several devices."""

from collections.abc import Callable
from typing import Any

from nsa_jax import arguments, attention
from nsa_jax.array_checks import check_arrays
from nsa_jax.array_typing import Array, Float, Int, Int32
from nsa_jax.compression import Compress, check_compress
from nsa_jax.config import NSAConfig, check_config
from nsa_jax.dispatch import Implementation, check_implementation
from nsa_jax.parallel.blocks import Rows, gather_compressed, halo_of_blocks
from nsa_jax.parallel.declared import check_declared
from nsa_jax.parallel.devices import Devices
from nsa_jax.parallel.order import Order
from nsa_jax.parallel.shards import Shards


def context_attention(
    query: Float[Array, "B T N H"],
    key_cmp: Float[Array, "B T K H"],
    value_cmp: Float[Array, "B T K V"],
    key_slc: Float[Array, "B T K H"],
    value_slc: Float[Array, "B T K V"],
    key_win: Float[Array, "B T K H"],
    value_win: Float[Array, "B T K V"],
    gates: Float[Array, "B T N 3"],
    *,
    compress: Compress,
    config: NSAConfig,
    axis: str,
    order: Order = "zigzag",
    block_indices: Int[Array, "B T K R"] | None = None,
    positions: Int[Array, "B T"] | None = None,
    segment_ids: Int[Array, "B T"] | None = None,
    scale: float | None = None,
    implementation: Implementation | None = None,
) -> Float[Array, "B T N V"]:
    """`nsa_jax.native_sparse_attention` of rows whose tokens are spread over a mesh axis.

    For use inside `jax.shard_map` over `axis`. Each device passes its `T` of the `S` tokens, in the declared
    order, and gets their outputs. It compresses the blocks that end in its own tokens. Compressed keys and
    values, and keys and values of the selected branch, are gathered; the window branch gets the tokens before
    each chunk from the device that holds them. Results are those of one device. `scale` and `implementation`
    are those of `nsa_jax.compressed_attention`.

    Args:
      query: rotated queries.
      key_cmp: keys of the compressed branch, not compressed and not rotated.
      value_cmp: values of the compressed branch, not compressed.
      key_slc: rotated keys of the selected branch.
      value_slc: values of the selected branch.
      key_win: rotated keys of the window branch.
      value_win: values of the window branch.
      gates: one gate per token, query head and branch, in the order cmp, slc, win; of any float dtype.
      compress: compresses and rotates blocks: an `nsa_jax.cache.Compression`, or a function of key windows
        `[B, m, l, K, H]`, value windows and the rotary positions `[B, m]` of their first tokens. Some windows
        are not blocks; their results are dropped, but their gradients must be finite.
      config: block structure.
      axis: name of the mesh axis over which the tokens are spread.
      order: which tokens a device holds: "zigzag" (see `to_zigzag`) or "contiguous".
      block_indices: a selection to use instead of choosing one, see `context_selection`.
      positions: rotary position of each token, which `compress` gets; by default its index in its sequence.
      segment_ids: sequence of each token of packed rows: each non-zero id is one contiguous run of the row,
        0 = padding. A sequence may lie on several devices.

    Returns:
      The output for the tokens of this device, in the query's dtype; 0 for a padding token with finite
      gates.

    Raises:
      TypeError: an argument is of the wrong kind, or an array of the wrong kind of dtype.
      ValueError: the call is not inside a `shard_map` over `axis`; chunks are shorter than `max(w, l) - 1` or
        not a multiple of the stride; or shapes or dtypes disagree.
      NotImplementedError: the implementation asked for cannot run the call.

    Gradients:
      With respect to every floating-point array, and to what `compress` closes over. Gradients of gathered
      arrays are reduce-scattered in their own dtype, in a fixed order.

    Numerics:
      Under `jax.experimental.checkify`, `positions` must count the tokens of each sequence one by one in the
      declared order, and segment ids must be contiguous runs of it. JAX 0.11 traces checks only in a
      `shard_map` over all axes of a mesh that is passed to it, without a mesh in context; elsewhere such a
      call fails with an error about meshes.
    """
    arrays = dict(
        query=query, key_cmp=key_cmp, value_cmp=value_cmp, key_slc=key_slc, value_slc=value_slc,
        key_win=key_win, value_win=value_win, gates=gates, block_indices=block_indices,
        positions=positions, segment_ids=segment_ids,
    )  # fmt: skip
    shards = _shards(context_attention, arrays, compress, axis, order, config, scale, implementation)
    keys_values = exchanged(
        shards, (key_cmp, value_cmp), (key_slc, value_slc), (key_win, value_win),
        compress=compress, config=config, positions=positions, segment_ids=segment_ids,
    )  # fmt: skip
    return attention.native_sparse_attention(
        query,
        gates=gates,
        **keys_values,
        config=config,
        block_indices=block_indices,
        scale=scale,
        implementation=implementation,
    )


def exchanged(
    shards: Shards,
    compressed: tuple[Float[Array, "B T K H"], Float[Array, "B T K V"]],
    selected: tuple[Float[Array, "B T K H"], Float[Array, "B T K V"]],
    window: tuple[Float[Array, "B T K H"], Float[Array, "B T K V"]],
    *,
    compress: Compress,
    config: NSAConfig,
    positions: Int[Array, "B T"] | None = None,
    segment_ids: Int[Array, "B T"] | None = None,
) -> dict[str, Any]:
    """Gets from the other devices what the queries of this device attend to.

    Args:
      shards: how rows lie on the devices.
      compressed: keys and values of the compressed branch, not compressed, of this device.
      selected: those of the selected branch.
      window: those of the window branch.
      compress: as in `context_attention`.
      config: block structure.
      positions: as in `context_attention`.
      segment_ids: as in `context_attention`.

    Returns:
      Arguments of `nsa_jax.native_sparse_attention`: the keys and values of all branches, and where the
      queries of this device stand among them.
    """
    # The longest message comes first, so that the compressed branch can compute while it is under way.
    key_slc, value_slc = shards.gather(*map(shards.split, selected))
    rows = _rows(shards, positions, segment_ids)
    block_halo, halo = halo_of_blocks(config, segment_ids is not None), config.window_size - 1
    to_compress, windows = shards.stretches([(compressed, block_halo), (window, halo)])
    key_cmp, value_cmp = gather_compressed(to_compress, shards, compress, config, rows)
    key_win, value_win = (x.reshape(x.shape[0], -1, *x.shape[3:]) for x in windows)
    return dict(
        key_cmp=key_cmp, value_cmp=value_cmp, key_slc=key_slc, value_slc=value_slc, key_win=key_win,
        value_win=value_win, query_positions=shards.runs(halo), segment_ids=rows.segment_ids,
    )  # fmt: skip


def context_selection(
    query: Float[Array, "B T N H"],
    key_cmp: Float[Array, "B T K H"],
    value_cmp: Float[Array, "B T K V"],
    *,
    compress: Compress,
    config: NSAConfig,
    axis: str,
    order: Order = "zigzag",
    positions: Int[Array, "B T"] | None = None,
    segment_ids: Int[Array, "B T"] | None = None,
    scale: float | None = None,
    implementation: Implementation | None = None,
) -> Int32[Array, "B T K R"]:
    """`nsa_jax.select_blocks` of rows whose tokens are spread over a mesh axis.

    Args and errors are those of `context_attention`, which makes the same choice.

    Args:
      query: rotated queries.
      key_cmp: keys of the compressed branch, not compressed and not rotated.
      value_cmp: values of the compressed branch, which only `compress` needs.
      compress: compresses and rotates blocks.
      config: block structure.
      axis: name of the mesh axis over which the tokens are spread.
      order: which tokens a device holds.
      positions: rotary position of each token.
      segment_ids: sequence of each token of packed rows.
      scale: factor of the logits.
      implementation: one of `nsa_jax.dispatch.IMPLEMENTATIONS` or None.

    Returns:
      The selection of the tokens of this device, as `nsa_jax.select_blocks` returns it.
    """
    arrays = dict(
        query=query, key_cmp=key_cmp, value_cmp=value_cmp, positions=positions, segment_ids=segment_ids
    )
    shards = _shards(context_selection, arrays, compress, axis, order, config, scale, implementation)
    rows = _rows(shards, positions, segment_ids)
    pair = (key_cmp, value_cmp), halo_of_blocks(config, segment_ids is not None)
    (to_compress,) = shards.stretches([pair])
    key, _ = gather_compressed(to_compress, shards, compress, config, rows)
    return attention.select_blocks(
        query,
        key,
        config=config,
        query_positions=shards.runs(),
        segment_ids=rows.segment_ids,
        scale=scale,
        implementation=implementation,
    )


def _rows(shards: Shards, positions: Array | None, segment_ids: Array | None) -> Rows:
    rows = Rows(*(None if x is None else shards.gather(shards.split(x))[0] for x in (positions, segment_ids)))
    check_declared(*rows, shards.order)
    return rows


def _shards(
    operation: Callable[..., Any],
    arrays: dict[str, Any],
    compress: Compress,
    axis: str,
    order: Order,
    config: NSAConfig,
    scale: float | None,
    implementation: Implementation | None,
) -> Shards:
    """Validates a call and finds how the rows lie on the devices."""
    check_compress(compress)
    sizes = check_arrays(operation, **arrays)
    check_config(config)
    arguments.check_not_empty(sizes)
    arguments.check_heads(sizes)
    arguments.check_selection(sizes, config)
    arguments.resolve_scale(scale, sizes["H"], arrays["query"].dtype)
    check_implementation(implementation)
    return Shards.of(Devices.along(axis), order, sizes["T"], config)
