"""The NSA layer's numbers: against a plain computation, packed, shifted."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from modules import named
from small_layer import (
    CONFIG,
    HEADS,
    KV_HEADS,
    LENGTH,
    ROUNDING,
    ROWS,
    WIDTH,
    WeightedSum,
    assert_close,
    fixed_gate,
    make_layer,
    random,
)

from nsa_jax import reference

# With base 4 and two rotated pairs every angle is exact in float32.
EXACT_BASE = 4.0

WHOLE = np.ones((ROWS, LENGTH), np.int32)  # segment ids of rows that hold one sequence each


def plain_phi(weights, name, blocks):
    """Compressed keys or values of blocks [B, C, K, l, H]."""
    flat = (blocks + weights[f"{name}.position_embedding"]).reshape(*blocks.shape[:3], -1)
    hidden = jax.nn.gelu(flat @ weights[f"{name}.kernel_in"] + weights[f"{name}.bias_in"])
    return blocks.mean(3) + hidden @ weights[f"{name}.kernel_out"] + weights[f"{name}.bias_out"]


def plain_gate(weights, x):
    hidden = jax.nn.silu(x @ weights["gate.kernel_in"] + weights["gate.bias_in"])
    logits = jnp.tensordot(hidden, weights["gate.kernel_out"], 1) + weights["gate.bias_out"]
    return 1 / (1 + jnp.exp(-logits))


def plain_weighted_sum(weights, name, blocks):
    return jnp.einsum("bckld,l->bckd", blocks, weights[f"{name}.weights"])


def plain_fixed_gate(weights, x):
    exponents = jnp.exp(x.reshape(*x.shape[:2], HEADS, 3))
    return exponents / exponents.sum(-1, keepdims=True)


OWN_PARTS = dict(compressor=WeightedSum, gate=fixed_gate)
PLAIN_PARTS = dict(phi=plain_weighted_sum, gate=plain_fixed_gate)


def plain_operands(weights, x, positions, *, phi=plain_phi, gate=plain_gate):
    """What attention is given in rows of one sequence, in plain code: complex rotation, stacked blocks."""

    def project(name):
        return jnp.tensordot(x, weights[f"{name}_proj.kernel"], 1) + weights[f"{name}_proj.bias"]

    def turn(heads, positions):
        half = heads.shape[-1] // 2
        frequency = np.array([EXACT_BASE ** (-i / half) for i in range(half)], np.float32)
        angle = jnp.asarray(positions, jnp.float32)[:, :, None, None] * frequency
        wide = heads.astype(jnp.promote_types(heads.dtype, jnp.float32))
        pairs = jax.lax.complex(wide[..., :half], wide[..., half : 2 * half])
        pairs = pairs * jnp.exp(1j * angle.astype(wide.dtype))
        return jnp.concatenate([pairs.real, pairs.imag, wide[..., 2 * half :]], axis=-1).astype(heads.dtype)

    def compress(tokens, name):
        if not starts:
            return tokens[:, :0]
        blocks = jnp.stack([tokens[:, start : start + CONFIG.compression_block_size] for start in starts], 1)
        return phi(weights, name, jnp.moveaxis(blocks, 2, 3))

    starts = range(0, x.shape[1] - CONFIG.compression_block_size + 1, CONFIG.compression_stride)
    return (
        turn(project("query"), positions),
        turn(compress(project("key_cmp"), "compressor_key"), positions[:, list(starts)]),
        compress(project("value_cmp"), "compressor_value"),
        turn(project("key_slc"), positions),
        project("value_slc"),
        turn(project("key_win"), positions),
        project("value_win"),
        gate(weights, x).astype(x.dtype),
    )


def plain_layer(weights, x, positions):
    """The layer in plain code, with the oracle."""
    out = reference.native_sparse_attention(*plain_operands(weights, x, positions), config=CONFIG)
    return jnp.tensordot(out, weights["out_proj.kernel"], 2) + weights["out_proj.bias"]


@functools.cache
def float64_layer():
    """Parameters of a layer, and a compiled function that gives its outputs, selection and gradients."""
    with jax.enable_x64(True):
        graph, state = nnx.split(make_layer(jnp.float64, rope_base=EXACT_BASE))

    def evaluate(state, x, cotangent, positions, segment_ids):
        arguments = dict(positions=positions, segment_ids=segment_ids)
        out, pull_back = jax.vjp(lambda state, x: nnx.merge(graph, state)(x, **arguments), state, x)
        selection = nnx.merge(graph, state).inspect(x, **arguments)
        return out, selection, *pull_back(cotangent)

    return state, jax.jit(evaluate)


POSITIONS = np.arange(7, 7 + 3 * LENGTH, 3) + 100 * np.arange(ROWS)[:, None]


def test_values_and_gradients_are_those_of_the_plain_computation():
    """With segment ids, in the program that packed rows take."""
    state, evaluate = float64_layer()
    x, cotangent = random(ROWS, LENGTH, WIDTH), random(ROWS, LENGTH, WIDTH, seed=1)

    @jax.jit
    def plain(weights, x):
        run = functools.partial(plain_layer, positions=POSITIONS)
        out, pull_back = jax.vjp(run, weights, x)
        return out, pull_back(cotangent)

    with jax.enable_x64(True):
        out, selection, state_gradient, x_gradient = evaluate(state, x, cotangent, POSITIONS, WHOLE)
        expected, (weight_gradients, expected_x_gradient) = plain(named(state), x)

    assert_close(out, expected, ROUNDING)
    assert_close(x_gradient, expected_x_gradient, 2 * ROUNDING)
    assert selection.block_indices.shape == (ROWS, LENGTH, KV_HEADS, CONFIG.num_selected_blocks)
    assert selection.gates.shape == (ROWS, LENGTH, HEADS, 3)
    gradients = named(state_gradient)
    assert gradients.keys() == weight_gradients.keys()
    for name, expected in weight_gradients.items():
        assert_close(gradients[name], expected, 2 * ROUNDING, name)
        assert np.asarray(expected).any(), f"{name} learns"


def test_own_parts_are_those_of_the_plain_computation():
    """What attention is given, without segment ids; gradients reach them. The rest is that of every layer."""
    x = random(ROWS, LENGTH, WIDTH)

    @jax.jit
    def gradients(state, x):
        def squares(state, x, names):
            made = nnx.merge(graph, state).operands(x)
            return sum((getattr(made, name) ** 2).sum() for name in names)

        of_compressors = jax.grad(squares)(state, x, ("key_cmp", "value_cmp"))
        of_gates = jax.grad(squares, argnums=1)(state, x, ("gates",))
        return of_compressors, of_gates, nnx.merge(graph, state).operands(x, positions=POSITIONS)

    with jax.enable_x64(True):
        layer = make_layer(jnp.float64, rope_base=EXACT_BASE, **OWN_PARTS)
        graph, state = nnx.split(layer)
        plain = jax.jit(functools.partial(plain_operands, positions=POSITIONS, **PLAIN_PARTS))
        of_compressors, of_gates, found = gradients(state, x)
        for ours, theirs in zip(found, plain(named(state), x), strict=True):
            assert_close(ours, theirs, ROUNDING)

    for part in ("key", "value"):
        assert np.all(named(of_compressors)[f"compressor_{part}.weights"])
    assert np.all(of_gates)


def test_rows_below_a_block_are_those_of_the_plain_computation():
    x, positions = random(ROWS, 3, WIDTH), np.arange(3)[None].repeat(ROWS, 0)

    with jax.enable_x64(True):
        layer = make_layer(jnp.float64, rope_base=EXACT_BASE)
        plain = jax.jit(functools.partial(plain_layer, positions=positions))
        assert_close(jax.jit(layer)(x), plain(named(nnx.state(layer)), x), ROUNDING)


def test_packed_rows_equal_each_sequence_alone():
    """Values and gradients of four sequences with padding between, against rows that begin with one each."""
    runs = [(3, 5), (0, 2), (9, 3), (4, 10), (0, 1), (7, 2)]  # (segment id, length)
    ids = np.zeros_like(WHOLE)  # the other rows are padding
    ids[0] = np.concatenate([[number] * length for number, length in runs])
    state, evaluate = float64_layer()
    x = random(ROWS, LENGTH, WIDTH)
    cotangent = random(ROWS, LENGTH, WIDTH, seed=1) * (ids != 0)[:, :, None]
    alone_x, alone_cotangent = np.zeros((2, ROWS, LENGTH, WIDTH))
    places = [np.flatnonzero(ids[0] == number) for number, _ in runs if number]
    local = np.zeros(ids.shape, int)
    for row, place in enumerate(places):
        alone_x[row, : len(place)] = x[0, place]
        alone_cotangent[row, : len(place)] = cotangent[0, place]
        local[0, place] = np.arange(len(place))
    positions = np.arange(LENGTH)[None].repeat(ROWS, 0)

    with jax.enable_x64(True):
        out, _, state_gradient, x_gradient = evaluate(state, x, cotangent, local, ids)
        alone, _, alone_state, alone_gradient = evaluate(state, alone_x, alone_cotangent, positions, WHOLE)
    out, x_gradient, alone, alone_gradient = map(np.asarray, (out, x_gradient, alone, alone_gradient))

    for row, place in enumerate(places):
        assert_close(out[0, place], alone[row, : len(place)], ROUNDING)
        assert_close(x_gradient[0, place], alone_gradient[row, : len(place)], 2 * ROUNDING)
    for name, gradient in named(alone_state).items():
        assert_close(named(state_gradient)[name], gradient, 2 * ROUNDING, name)
    padding = ids == 0
    np.testing.assert_array_equal(x_gradient[padding], 0)
    np.testing.assert_array_equal(out[padding] - np.asarray(named(state)["out_proj.bias"]), 0)


def test_shifting_all_positions_leaves_every_output_unchanged():
    state, evaluate = float64_layer()
    x, cotangent = random(ROWS, LENGTH, WIDTH), random(ROWS, LENGTH, WIDTH, seed=1)
    positions = np.arange(LENGTH) * np.arange(1, 1 + ROWS)[:, None]

    with jax.enable_x64(True):
        out, selection, *gradients = evaluate(state, x, cotangent, positions, WHOLE)
        shifted, shifted_selection, *shifted_gradients = evaluate(
            state, x, cotangent, positions + 100_000, WHOLE
        )
        stretched, *_ = evaluate(state, x, cotangent, 2 * positions, WHOLE)

    assert_close(shifted, out, ROUNDING)
    np.testing.assert_array_equal(selection.block_indices, shifted_selection.block_indices)
    for gradient, expected in zip(*map(jax.tree.leaves, (shifted_gradients, gradients)), strict=True):
        assert_close(gradient, expected, 2 * ROUNDING)
    assert np.abs(np.asarray(stretched) - np.asarray(out)).max() > 1e-3


def test_the_future_changes_no_past_output_or_selection():
    state, evaluate = float64_layer()
    x, now = random(ROWS, LENGTH, WIDTH), 14
    changed = np.where(np.arange(LENGTH)[:, None] > now, random(ROWS, LENGTH, WIDTH, seed=1), x)
    positions, unused = np.arange(LENGTH)[None].repeat(ROWS, 0), np.zeros_like(x)

    with jax.enable_x64(True):
        before, after = (
            jax.tree.map(np.asarray, (out, *selection))
            for out, selection, *_ in (
                evaluate(state, each, unused, positions, WHOLE) for each in (x, changed)
            )
        )

    for one, other in zip(before, after, strict=True):
        np.testing.assert_array_equal(one[:, : now + 1], other[:, : now + 1])
        assert not np.array_equal(one, other)


def test_default_positions_are_sequence_indices():
    layer, x = make_layer(compression="mean"), random(1, LENGTH, WIDTH).astype(np.float32)
    ids, local = np.array([[1] * 9 + [2] * 14]), np.concatenate([np.arange(9), np.arange(14)])[None]

    @nnx.jit
    def operands(layer, x, ids, index, local):
        of_row = layer.operands(x), layer.operands(x, positions=index)
        of_packed = (
            layer.operands(x, segment_ids=ids),
            layer.operands(x, segment_ids=ids, positions=local),
        )
        return of_row, of_packed

    for default, given in operands(layer, x, ids, np.arange(LENGTH)[None], local):
        jax.tree.map(np.testing.assert_array_equal, default, given)
