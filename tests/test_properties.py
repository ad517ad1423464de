"""Properties that hold for any numbers: causality, determinism, sizes, dense equality, symmetry."""

import functools

import brute_force
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases import BY_NAME, PACKED_ROWS, PLAIN, Operands
from programs import BRANCHES, by_brute_force, cached, disagreements, evaluate, random_cotangents

from nsa_jax import attention
from nsa_jax.kernels.xla.sizes import Sizes

PER_QUERY = (
    "out",
    "blocks",
    *(f"{kind}_{branch}" for kind in ("out", "lse") for branch in BRANCHES),
)


def hidden_rows(case, after):
    """Which rows of each operand must not affect a query at or before token `after`."""
    config = case.config
    tokens = np.arange(case.num_keys) > after
    last = np.arange(case.num_compressed) * config.compression_stride + config.compression_block_size - 1
    compressed = last > after
    return {name: compressed if name in ("key_cmp", "value_cmp") else tokens for name in Operands._fields}


def with_other_future(case, after, change):
    return Operands(*(
        np.where(hidden[None, :, None, None], change(operand), operand)
        for operand, hidden in zip(case.draw(), hidden_rows(case, after).values(), strict=True)
    ))  # fmt: skip


@pytest.mark.parametrize("change", ["other numbers", "huge numbers"])
@pytest.mark.parametrize("after", [0, 2, 3, 5, 6, 29, 47, 59])
def test_future_leaves_past_outputs_and_selections_bitwise_alone(after, change):
    """Both run in one compiled program. Later queries select other blocks, so the work is grouped anew."""
    rng = np.random.default_rng(after)
    change = {
        "other numbers": lambda x: rng.standard_normal(x.shape),
        "huge numbers": lambda x: 1e18 * rng.standard_normal(x.shape),
    }[change]
    changed = with_other_future(PLAIN, after, change)
    blocks = brute_force.evaluate(PLAIN, changed)["blocks"]
    found, expected = evaluate("xla", PLAIN, operands=changed, block_indices=blocks), cached("xla", "plain")
    past = slice(None, after + 1)

    for name in PER_QUERY:
        assert found[name][:, past].tobytes() == expected[name][:, past].tobytes(), name
    assert not np.array_equal(found["out"], expected["out"])


def test_outputs_of_the_past_send_no_gradient_to_the_future():
    after = 31
    past = np.arange(PLAIN.num_keys) <= after
    cotangents = {
        name: np.where(past.reshape(1, -1, *[1] * (x.ndim - 2)), x, 0)
        for name, x in random_cotangents(PLAIN).items()
    }
    found = evaluate("xla", PLAIN, cotangents=cotangents)
    for name, hidden in hidden_rows(PLAIN, after).items():
        assert not found[f"d_{name}"][:, hidden].any(), name
        assert found[f"d_{name}"][:, ~hidden].any(), name


def test_runs_repeat_bit_for_bit_forward_and_backward():
    first = evaluate("xla", PLAIN)
    for _ in range(3):
        again = evaluate("xla", PLAIN)
        assert {name: x.tobytes() for name, x in again.items()} == {
            name: x.tobytes() for name, x in first.items()
        }


def drawn_tiles(seed):
    rng = np.random.default_rng(seed)
    sizes = dict(query_chunk=40, key_tile=40, selected_chunk=80, pairs_per_item=20, items_per_step=9)
    return Sizes(**{name: int(rng.integers(2, most)) for name, most in sizes.items()})


TILES = {
    "drawn": drawn_tiles(0),
    "drawn under a mask": drawn_tiles(1)._replace(dense_blocks=100),
}


@pytest.mark.parametrize("sizes", TILES.values(), ids=TILES)
def test_tiles_change_nothing(sizes):
    found, expected = evaluate("xla", PACKED_ROWS, sizes=sizes), cached("xla", "packed_rows")

    assert found["blocks"].tolist() == expected["blocks"].tolist()
    assert disagreements(found, expected) == {}


@pytest.mark.parametrize("branch", ["slc", "win"])
def test_branch_that_covers_everything_is_dense_attention(branch):
    """To 1e-5 in float32: selecting all blocks, or a window longer than the sequence."""
    case = BY_NAME["everything_covered"]
    query, key, value = (
        getattr(case.draw(), name).astype(np.float32)
        for name in ("query", f"key_{branch}", f"value_{branch}")
    )
    if branch == "win":
        sparse = functools.partial(attention.window_attention, config=case.config)
    else:
        blocks = by_brute_force(case.name)["blocks"].astype(np.int32)
        sparse = functools.partial(attention.selected_attention, block_indices=blocks, config=case.config)

    def dense(query, key, value):
        # jax.nn needs one dim for keys and values; zeros on the right change no column of the values.
        value = jnp.pad(value, ((0, 0),) * 3 + ((0, case.key_dim - case.value_dim),))
        with jax.default_matmul_precision("highest"):
            return jax.nn.dot_product_attention(query, key, value, is_causal=True)[..., : case.value_dim]

    cotangent = random_cotangents(case)["out"].astype(np.float32)

    def with_gradients(attend):
        out, pull_back = jax.vjp(attend, query, key, value)
        return out, *pull_back(cotangent)

    found = jax.jit(with_gradients, static_argnums=0)(lambda *x: sparse(*x)[0])
    expected = jax.jit(with_gradients, static_argnums=0)(dense)
    for ours, theirs in zip(found, expected, strict=True):
        assert np.abs(ours - theirs).max() < 1e-5 * max(1, np.abs(theirs).max())


def test_query_heads_of_a_kv_head_may_change_places():
    """Only the KV head of a query head matters: reordering heads that share one reorders the outputs."""
    operands, cotangents = PLAIN.draw(), random_cotangents(PLAIN)
    swap = np.array([1, 0, 3, 2])
    found = evaluate(
        "xla", PLAIN,
        operands=operands._replace(query=operands.query[:, :, swap], gates=operands.gates[:, :, swap]),
        cotangents={name: x[:, :, swap] for name, x in cotangents.items()},
    )  # fmt: skip
    expected = dict(cached("xla", "plain"))
    for name in (*cotangents, "d_query", "d_gates"):
        expected[name] = expected[name][:, :, swap]

    assert found["blocks"].tolist() == expected["blocks"].tolist()
    assert disagreements(found, expected) == {}


@pytest.mark.parametrize("fill", [np.nan, np.inf], ids=["nan", "inf"])
@pytest.mark.parametrize("module", ["reference", "xla"])
def test_what_nobody_may_see_need_not_be_finite(module, fill):
    """NaN or infinity in the future, in padding, in other rows and in other KV heads changes no result."""
    after = 30
    past = slice(None, after + 1)
    found = evaluate(module, PLAIN, operands=with_other_future(PLAIN, after, lambda x: fill))
    for name in PER_QUERY:
        if name in found:
            assert np.array_equal(found[name][:, past], cached(module, "plain")[name][:, past]), name

    operands, padding = PACKED_ROWS.draw(), PACKED_ROWS.segment_ids == 0
    for name in Operands._fields:
        if not name.endswith("_cmp"):
            getattr(operands, name)[padding] = fill
    found, expected = evaluate(module, PACKED_ROWS, operands=operands), cached(module, "packed_rows")
    for name, x in expected.items():
        seen = np.s_[:] if name.endswith("_cmp") and name.startswith("d_") else ~padding
        assert np.array_equal(found[name][seen], x[seen]), name

    operands = PLAIN.draw()
    for x in operands:
        x[0] = fill
        x[:, :, : x.shape[2] // PLAIN.num_kv_heads] = fill
    found, expected = evaluate(module, PLAIN, operands=operands), cached(module, "plain")
    for name, x in expected.items():
        assert np.array_equal(found[name][1, :, x.shape[2] // 2 :], x[1, :, x.shape[2] // 2 :]), name
