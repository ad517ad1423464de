"""phi: which blocks it takes from plain and packed rows, and what it computes from them."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from modules import abstract, randomised

from nsa_jax import layout
from nsa_jax.config import NSAConfig
from nsa_jax.layout import first_tokens, token_windows
from nsa_jax.nn import Compressor

CONFIGS = {
    "overlapping": NSAConfig(
        compression_block_size=4, compression_stride=2, selection_block_size=4, num_selected_blocks=3
    ),
    "thrice overlapping": NSAConfig(
        compression_block_size=6, compression_stride=2, selection_block_size=6, num_selected_blocks=3
    ),
    "disjoint": NSAConfig(
        compression_block_size=4, compression_stride=4, selection_block_size=8, num_selected_blocks=3
    ),
}
ROWS = {
    "two sequences": [1] * 9 + [2] * 14,
    "padding before, between, after": [0] * 3 + [7] * 8 + [0] * 2 + [5] * 6 + [0] * 4,
    "sequences shorter than a block": [1] * 2 + [2] * 3 + [3] * 12 + [4] * 3 + [5] * 3,
    "one token each": list(range(1, 24)),
    "padding alone": [0] * 23,
    "one sequence": [1] * 23,
}


@pytest.fixture(params=CONFIGS.values(), ids=CONFIGS.keys())
def config(request):
    return request.param


def block_starts(segment_ids, config):
    """Row index of the first token of each block of one row, by walking over it."""
    starts, begin = [], 0
    for end in range(1, len(segment_ids) + 1):
        if end == len(segment_ids) or segment_ids[end] != segment_ids[begin]:
            if segment_ids[begin]:
                last = end - config.compression_block_size
                starts += range(begin, last + 1, config.compression_stride)
            begin = end
    return starts


def integers(*shape):
    """Floats that are small integers, so that sums are exact and can be compared for equality."""
    return np.random.default_rng(0).integers(-9, 10, shape).astype(np.float32)


@pytest.mark.parametrize("length", [0, 3, 4, 6, 7, 23])
def test_windows_of_a_plain_row(config, length):
    x = integers(2, length, 3, 5)

    windows = np.asarray(jax.jit(token_windows, static_argnums=1)(x, config))

    size = config.compression_block_size
    expected = [x[:, start : start + size] for start in block_starts([1] * length, config)]
    assert windows.shape == (2, layout.num_compression_blocks(length, config), size, 3, 5)
    for block, tokens in enumerate(expected):
        np.testing.assert_array_equal(windows[:, block], tokens)


def test_windows_of_packed_rows_and_their_backward(config):
    """The rows of a batch are packed differently, under jit; windows and gradient equal those of a loop."""
    ids, size = np.asarray(list(ROWS.values())), config.compression_block_size
    x, starts = integers(*ids.shape, 2, 3), [block_starts(row, config) for row in ids]
    cotangent = integers(len(ids), layout.num_compression_blocks(ids.shape[1], config), size, 2, 3)

    @jax.jit
    def windows_and_gradient(x, ids):
        windows, pull_back = jax.vjp(lambda x: token_windows(x, config, ids), x)
        return windows, pull_back(cotangent)[0]

    windows, gradient = map(np.asarray, windows_and_gradient(x, ids))

    expected_gradient = np.zeros_like(x)
    for row, blocks in enumerate(starts):
        for block, start in enumerate(blocks):
            np.testing.assert_array_equal(windows[row, block], x[row, start : start + size])
            expected_gradient[row, start : start + size] += cotangent[row, block]
        np.testing.assert_array_equal(windows[row, len(blocks) :], 0, err_msg=f"unused slots of row {row}")
    np.testing.assert_array_equal(gradient, expected_gradient)


def test_packed_windows_under_vmap_and_remat():
    config, ids = CONFIGS["overlapping"], np.asarray(list(ROWS.values()))
    x = integers(*ids.shape, 2, 3)

    def objective(x, ids):
        windows = token_windows(x, config, ids)
        return (windows * integers(*windows.shape[1:])).sum()

    together = jax.jit(jax.grad(objective))(x, ids)
    apart = jax.jit(jax.vmap(jax.grad(jax.checkpoint(objective))))(x[:, None], ids[:, None])

    np.testing.assert_array_equal(together, apart[:, 0])


def test_hessian_vector_products_of_packed_windows(config):
    """Of the sum of cubes: `6 x v` of a token, for each window that it is in. JAX once refused the `jvp`."""
    ids, size = np.asarray(list(ROWS.values())), config.compression_block_size
    x, way = integers(2, *ids.shape, 1, 3)

    gradient = jax.grad(lambda x: (token_windows(x, config, ids) ** 3).sum())
    change = jax.jit(lambda x: jax.jvp(gradient, (x,), (way,))[1])(x)

    times = np.zeros((*ids.shape, 1, 1))
    for row, segment_ids in enumerate(ids):
        for start in block_starts(segment_ids, config):
            times[row, start : start + size] += 1
    np.testing.assert_array_equal(change, 6 * x * way * times)


def test_neither_direction_scatters(config):
    x, ids = jnp.zeros((2, 23, 2, 3)), jnp.ones((2, 23), jnp.int32)

    for segment_ids in (None, ids):
        gradient = jax.make_jaxpr(jax.grad(lambda x: token_windows(x, config, segment_ids).sum()))(x)  # noqa: B023
        assert "scatter" not in str(gradient)


def test_packed_rows_shorter_than_a_block(config):
    ids = jnp.ones((2, 3), jnp.int32)
    x = jnp.ones((2, 3, 2, 5))

    @jax.jit
    def windows_and_gradient(x):
        windows, pull_back = jax.vjp(lambda x: token_windows(x, config, ids), x)
        return windows, pull_back(windows)[0]

    windows, gradient = windows_and_gradient(x)

    assert windows.shape == (2, 0, config.compression_block_size, 2, 5)
    np.testing.assert_array_equal(gradient, np.zeros(x.shape))
    assert jax.eval_shape(lambda ids: first_tokens(ids, config, ids), ids).shape == (2, 0)


def test_first_tokens(config):
    ids = np.asarray(list(ROWS.values()))
    per_token = np.random.default_rng(2).integers(0, 99, ids.shape)

    @jax.jit
    def of_rows(per_token, ids):
        return first_tokens(per_token, config, ids), first_tokens(per_token, config)

    packed, plain = map(np.asarray, of_rows(per_token, ids))

    for row, segment_ids in enumerate(ids):
        starts = block_starts(segment_ids, config)
        np.testing.assert_array_equal(packed[row, : len(starts)], per_token[row, starts])
    np.testing.assert_array_equal(plain[-1], packed[-1])


def test_mean_mode_is_the_mean_and_has_no_parameters(config):
    compressor = Compressor(5, config, "mean", rngs=nnx.Rngs(0))
    x = integers(2, 23, 3, 5)

    compressed = np.asarray(jax.jit(lambda x: compressor(token_windows(x, config)))(x))

    assert jax.tree.leaves(nnx.state(compressor)) == []
    for block, start in enumerate(block_starts([1] * 23, config)):
        tokens = x[:, start : start + config.compression_block_size]
        np.testing.assert_allclose(compressed[:, block], tokens.mean(axis=1), rtol=0, atol=1e-6)


def test_mlp_mode_starts_as_the_mean():
    config = CONFIGS["overlapping"]

    @jax.jit
    def compressed(x):
        of = Compressor(5, config, rngs=nnx.Rngs(0)), Compressor(5, config, "mean", rngs=nnx.Rngs(0))
        return [compressor(token_windows(x, config)) for compressor in of]

    np.testing.assert_array_equal(*compressed(integers(2, 23, 3, 5)))


@pytest.mark.parametrize("way", ["windows", "rows"])
def test_mlp_mode_is_its_formula(way):
    """Per block and KV head, by loops: mean + gelu_tanh(flatten(block + embedding) @ in + b) @ out + b."""
    config = CONFIGS["overlapping"]
    with jax.enable_x64(True):
        compressor = abstract(Compressor, 5, config, hidden_dim=7, param_dtype=jnp.float64)
        rng = np.random.default_rng(0)
        for variable in jax.tree.leaves(
            nnx.state(compressor), is_leaf=lambda leaf: isinstance(leaf, nnx.Param)
        ):
            variable.set_value(jnp.asarray(rng.standard_normal(variable.shape)))
        x = rng.standard_normal((2, 23, 3, 5))

        ways = {"windows": lambda of, x: of(token_windows(x, config)), "rows": Compressor.of_rows}
        compressed = np.asarray(nnx.jit(ways[way])(compressor, x))

        weights = {
            name: np.asarray(value.get_value()) for name, value in nnx.to_flat_state(nnx.state(compressor))
        }
    for block, start in enumerate(block_starts([1] * 23, config)):
        for row in range(2):
            for head in range(3):
                tokens = x[row, start : start + config.compression_block_size, head]
                flat = (tokens + weights["position_embedding",]).reshape(-1)
                hidden = flat @ weights["kernel_in",] + weights["bias_in",]
                hidden = hidden / 2 * (1 + np.tanh(np.sqrt(2 / np.pi) * (hidden + 0.044715 * hidden**3)))
                expected = tokens.mean(axis=0) + hidden @ weights["kernel_out",] + weights["bias_out",]
                # Two contractions of 20 and 7 terms of size ~5, sums up to 50: (20 + 7) * 50 * 2^-53.
                np.testing.assert_allclose(compressed[row, block, head], expected, rtol=0, atol=2e-13)


@pytest.mark.parametrize("mode", ["mlp", "mean"])
@pytest.mark.parametrize("length", [0, 3, 4, 6, 23, 40])
def test_rows_are_compressed_as_their_windows_are(config, mode, length):
    """Outputs and all gradients. The third token is NaN, and only blocks that have it may be."""
    with jax.enable_x64(True):
        compressor = randomised(abstract(Compressor, 5, config, mode, param_dtype=jnp.float64), 0.3)
        rng = np.random.default_rng(length)
        x = rng.standard_normal((2, length, 3, 5))
        broken = np.where((np.arange(length) == 2)[:, None, None], np.nan, x)
        graph, state = nnx.split(compressor)
        blocks = layout.num_compression_blocks(length, config)
        cotangent = rng.standard_normal((2, blocks, 3, 5))

        def of_way(compress):
            run = lambda state, x: compress(nnx.merge(graph, state), x)  # noqa: E731
            out, pull_back = jax.vjp(run, state, x)
            with_nan, pull_back_nan = jax.vjp(run, state, broken)
            return out, pull_back(cotangent), with_nan, pull_back_nan(cotangent)

        out, gradients, with_nan, gradients_with_nan = jax.jit(lambda: of_way(Compressor.of_rows))()
        expected = jax.jit(lambda: of_way(lambda compressor, x: compressor(token_windows(x, config))))()

    # As in `small_layer`: at most 100 terms of 10 times the scale of their sum, and gradients pass twice.
    rounding = 100 * 10 * np.finfo(np.float64).eps
    np.testing.assert_allclose(out, expected[0], rtol=0, atol=rounding)
    for found, wanted in zip(jax.tree.leaves(gradients), jax.tree.leaves(expected[1]), strict=True):
        np.testing.assert_allclose(found, wanted, rtol=0, atol=10 * rounding)
    assert (
        np.isnan(with_nan).sum()
        == np.isnan(expected[2]).sum()
        == (min(blocks, 2 // config.compression_stride + 1) * 30)
    )
    np.testing.assert_allclose(with_nan, expected[2], rtol=0, atol=rounding)
    if blocks == 0:  # then nothing sees the token
        assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(gradients_with_nan))


def test_rows_must_have_heads_of_the_compressor():
    compressor = abstract(Compressor, 5, CONFIGS["overlapping"])

    with pytest.raises(ValueError, match=r"rows must be \[B, S, K, 5\], got \(1, 8, 2, 6\)"):
        compressor.of_rows(jnp.zeros((1, 8, 2, 6)))
