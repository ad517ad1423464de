"""Keys and values that the branches share: results are those of three equal pairs, the cache holds one."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from messages import has_form
from selector_examples import Recent
from small_layer import (
    CONFIG,
    KEY_DIM,
    KV_HEADS,
    LENGTH,
    ROUNDING,
    ROWS,
    VALUE_DIM,
    WIDTH,
    assert_chunks_give,
    assert_close,
    assert_steps_give,
    make_layer,
    random,
)

from nsa_jax import cache, layout, nn
from nsa_jax.nn import NSAAttention, YarnScaling

BRANCHES = ("cmp", "slc", "win")
PACKED = np.array([[0, 0] + [3] * 9 + [1] * 12, [5] * 3 + [0] + [2] * 19])


def unshared(weights):
    """The weights of a layer with three pairs, each a copy of the one pair."""
    copied = {}
    for name, value in weights.items():
        first, *rest = name.split("_")
        pair = first in ("key", "value")
        copied |= {"_".join([first, branch, *rest]): value for branch in BRANCHES} if pair else {name: value}
    return copied


@functools.cache
def twins():
    """Two layers in float64: one whose branches share a pair, and one with three equal pairs."""
    with jax.enable_x64(True):
        options = dict(normalize_qk=True, compression="mean")
        shared = make_layer(jnp.float64, share_keys_values=True, **options)
        separate = make_layer(jnp.float64, **options)
        nn.load_weights(separate, unshared(nn.weights(shared)))
    return shared, separate


def test_what_attention_is_given_and_its_gradients_are_those_of_three_equal_pairs():
    """In plain and packed rows. Outputs are compared through the steps of a cache."""
    x = random(2, LENGTH, WIDTH)

    @nnx.jit
    def evaluate(layer, x):
        graph, state = nnx.split(layer)
        run = lambda state, x: nnx.merge(graph, state).operands(x)  # noqa: E731
        operands, pull_back = jax.vjp(run, state, x)
        of_each = type(operands)(*(number * jnp.cos(x) for number, x in enumerate(operands, 1)))
        packed = layer.operands(x, segment_ids=PACKED)
        return (*operands, *packed), *pull_back(of_each)

    with jax.enable_x64(True):
        shared, separate = twins()
        operands, gradients, x_gradient = evaluate(shared, x)
        expected, expected_gradients, expected_x_gradient = evaluate(separate, x)

    for found, wanted in zip(operands, expected, strict=True):
        assert_close(found, wanted, ROUNDING)
    assert_close(x_gradient, expected_x_gradient, 2 * ROUNDING)
    expected_gradients = named(expected_gradients)
    for name, gradient in named(gradients).items():
        if name.startswith("out_proj"):  # behind attention
            continue
        parts = [np.asarray(expected_gradients[copy]) for copy in unshared({name: None})]
        assert_close(gradient, sum(parts), 2 * ROUNDING, name)
        assert all(np.any(part) for part in parts), f"every branch of {name} learns"


def named(state):
    return {".".join(map(str, path)): leaf.get_value() for path, leaf in nnx.to_flat_state(state)}


YARN = YarnScaling(4.0, 24, beta_fast=3.0, beta_slow=0.2)
# One of 5 tokens is among the layers of test_nn_selector.
WINDOWS = {
    "window of one": (1, assert_steps_give),
    "window longer than the rows": (64, assert_chunks_give),
}


@pytest.mark.parametrize(("window_size", "assert_give"), WINDOWS.values(), ids=WINDOWS.keys())
def test_steps_of_a_cache_equal_the_full_forward(window_size, assert_give):
    config = dataclasses.replace(CONFIG, window_size=window_size)
    x = random(ROWS, LENGTH, WIDTH)
    with jax.enable_x64(True):
        layer = make_layer(
            jnp.float64, share_keys_values=True, config=config, selector=Recent, branches=("slc", "win"),
            rope_base=100.0, rope_scaling=YARN,
        )  # fmt: skip
        full = np.asarray(jax.jit(layer)(x))
        assert_give(full, layer, x)


def test_steps_of_several_tokens_are_those_of_three_equal_pairs():
    """Up to the capacity: a row without room for all of its tokens takes none."""
    x, capacity = random(3, 18, WIDTH), 12
    steps = [[3, 0, 3], [1, 0, 3], [0, 0, 1], [3, 2, 0], [1, 3, 3], [3, 3, 3]]

    @nnx.jit
    def step(layer, x, held, num_tokens):
        return layer.decode_step(x, held, num_tokens=num_tokens)

    def run(layer, x):
        outs, held = [], layer.init_cache(3, capacity, step_capacity=3)
        for tokens, num_tokens in zip(np.split(x, len(steps), axis=1), steps, strict=True):
            out, held = step(layer, tokens, held, np.array(num_tokens))
            outs.append(out)
        return outs, held

    with jax.enable_x64(True):
        (outs, held), (expected, expected_held) = (run(layer, x) for layer in twins())

    for out, wanted in zip(outs, expected, strict=True):
        assert_close(out, wanted, ROUNDING)
    assert held.lengths.tolist() == [11, 8, 10]
    assert held.overflowed.tolist() == [False, False, True]
    for field, found in held._asdict().items():
        if "win_ring" not in field and jax.tree.leaves(found):  # no array: `kept`, and scales of 8 bits
            assert_close(found, getattr(expected_held, field), ROUNDING, field)


def abstract_layer(**options):
    sizes = dict(num_kv_heads=KV_HEADS, head_dim=KEY_DIM, value_dim=VALUE_DIM, config=CONFIG)
    return nnx.eval_shape(lambda: NSAAttention(4, WIDTH, **sizes, **options, rngs=nnx.Rngs(0)))


def test_a_cache_holds_one_pair_and_no_window_ring():
    held = abstract_layer(share_keys_values=True).init_cache(2, 40, step_capacity=3)

    tokens = 40 + layout.num_compression_blocks(40, CONFIG) + CONFIG.compression_block_size + 2
    numbers = sum(leaf.size for leaf in jax.tree.leaves(held) if leaf.ndim == 4)
    assert numbers == 2 * tokens * KV_HEADS * (KEY_DIM + VALUE_DIM)
    assert held.key_win_ring is held.value_win_ring is None
    assert held.shares_keys_values
    assert not abstract_layer().init_cache(2, 40).shares_keys_values


def test_parameters_have_the_names_of_a_dense_layer():
    sizes = dict(num_kv_heads=KV_HEADS, normalize_qk=True)
    shared, dense = (
        nnx.eval_shape(lambda make=make, rest=rest: make(4, WIDTH, **sizes, **rest, rngs=nnx.Rngs(0)))
        for make, rest in ((NSAAttention, dict(share_keys_values=True)), (nn.DenseAttention, {}))
    )
    shapes = [{name: leaf.shape for name, leaf in named(nnx.state(each)).items()} for each in (shared, dense)]

    assert shapes[1].items() <= shapes[0].items()
    assert {name.partition(".")[0] for name in shapes[0].keys() - shapes[1].keys()} == {
        "gate",
        "compressor_key",
        "compressor_value",
    }


@pytest.mark.parametrize("step", ["prefill", "decode_step"])
@pytest.mark.parametrize("shares", [True, False])
def test_a_cache_of_the_other_kind_is_one_clear_error(step, shares):
    layer, other = (abstract_layer(share_keys_values=each) for each in (shares, not shares))
    told = f"got share_keys_values={not shares} for a layer with {shares}. Call init_cache of this layer"

    with pytest.raises(ValueError, match=told) as raised:
        getattr(layer, step)(np.ones((2, 1, WIDTH), np.float32), other.init_cache(2, 8))

    assert has_form(str(raised.value))


@pytest.mark.parametrize("step", [cache.prefill, cache.decode_step])
@pytest.mark.parametrize(
    ("shares", "names"), [(True, ("key_win", "value_win")), (False, ("key_win",)), (False, ())], ids=str
)
def test_tokens_of_the_other_kind_are_one_clear_error(step, shares, names):
    held = abstract_layer(share_keys_values=shares).init_cache(2, 8)
    key, value = np.ones((2, 1, KV_HEADS, KEY_DIM)), np.ones((2, 1, KV_HEADS, VALUE_DIM))
    window = {name: key if name == "key_win" else value for name in names}

    with pytest.raises(ValueError, match="tokens must have key_win and value_win unless") as raised:
        step(
            held,
            np.ones((2, 1, 4, KEY_DIM)),
            cache.TokenKeysValues(key, value, key, value, **window),
            np.ones((2, 1, 4, 3)),
            config=CONFIG,
            compress=lambda *_: None,
        )

    assert has_form(str(raised.value))
