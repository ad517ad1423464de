"""Operations under jit, grad, vmap, scan, remat and export equal their plain calls.

In shards, too: explicit_axes_program proves that.
"""

import dataclasses
import functools

import jax
import jax.ad_checkpoint
import jax.export
import numpy as np
import pytest
from cases import Case

from nsa_jax import attention, reference
from nsa_jax.budget import distance
from nsa_jax.config import NSAConfig
from nsa_jax.kernels import xla
from nsa_jax.kernels.xla.sizes import Sizes

CONFIG = NSAConfig(
    compression_block_size=4,
    compression_stride=2,
    selection_block_size=4,
    num_selected_blocks=4,
    window_size=5,
)
# Three rows, which vmap sees one by one; small, because each test compiles a program of its own.
CASE = Case(name="transformed", config=CONFIG, batch=3, num_keys=22, num_heads=2, num_kv_heads=1, key_dim=4)
TOLERANCE = 2e-5  # float32: 170 eps for sums of some 20 terms, merged in another order

attend = functools.partial(attention.native_sparse_attention, config=CONFIG)


@pytest.fixture(scope="module")
def operands():
    return tuple(jax.device_put(x.astype(np.float32)) for x in CASE.draw())


@pytest.fixture(scope="module")
def cotangent():
    rng = CASE.generator("cotangent")
    drawn = rng.standard_normal((CASE.batch, CASE.num_keys, CASE.num_heads, CASE.value_dim))
    return jax.device_put(drawn.astype(np.float32))


def with_gradients(function, cotangent, *operands):
    out, pull_back = jax.vjp(function, *operands)
    return out, *pull_back(cotangent)


# Compiled once, for the rows of all tests.
plain = jax.jit(functools.partial(with_gradients, attend))


@pytest.fixture(scope="module")
def expected(operands, cotangent):
    return plain(cotangent, *operands)


def agree(found, expected):
    assert len(found) == len(expected)
    for ours, theirs in zip(found, expected, strict=True):
        assert distance(np.asarray(ours), np.asarray(theirs)) <= TOLERANCE * max(1, np.abs(theirs).max())


def test_calls_outside_jit_equal_those_inside(operands, cotangent, expected):
    agree(with_gradients(attend, cotangent, *operands), expected)


def test_vmap_over_single_rows_equals_the_batch(operands, cotangent, expected):
    """Only vmap knows the batch axis; for values, and gradients that compute them again."""
    remat = jax.checkpoint(attend, policy=jax.checkpoint_policies.nothing_saveable)

    def one(cotangent, *row):
        return [x[0] for x in with_gradients(remat, cotangent[None], *(x[None] for x in row))]

    agree(jax.jit(jax.vmap(one))(cotangent, *operands), expected)


def test_vmap_over_one_operand_alone(operands, cotangent):
    """Several queries on the same keys: vmap adds an axis that the other operands do not have."""
    query, *others = operands
    queries = np.stack([query, query[::-1]])
    found = jax.jit(jax.vmap(lambda query: attend(query, *others)))(queries)

    agree(found, [plain(cotangent, x, *others)[0] for x in queries])


def test_scan_over_steps(operands, expected):
    query, *others = operands

    def step(total, scale):
        out = attend(query, *others[:-1], others[-1] * scale)
        return total + out, out

    out = np.asarray(expected[0])
    total, each = jax.jit(lambda: jax.lax.scan(step, np.zeros_like(out), np.array([1.0, -0.5], np.float32)))()

    agree((*np.asarray(each), total), (out, -0.5 * out, 0.5 * out))


def test_rematerialisation_saves_nothing_but_the_operands(operands, capsys):
    remat = jax.checkpoint(attend, policy=jax.checkpoint_policies.nothing_saveable)
    jax.ad_checkpoint.print_saved_residuals(lambda *x: remat(*x).sum(), *operands)
    saved = capsys.readouterr().out.strip().splitlines()

    assert len(saved) >= 1
    assert all("from the argument" in line or "from a constant" in line for line in saved)


def test_export_for_any_number_of_rows(operands, cotangent):
    """Branch by branch; all at once, which is one program of products, it is exported alone."""
    config = dataclasses.replace(CONFIG, num_selected_blocks=2, num_local_blocks=1)
    by_branch = functools.partial(attention.native_sparse_attention, config=config)
    program = jax.jit(functools.partial(with_gradients, by_branch))
    expected = jax.tree.map(np.asarray, program(cotangent, *operands))
    (batch,) = jax.export.symbolic_shape("batch")
    shapes = [jax.ShapeDtypeStruct((batch, *x.shape[1:]), x.dtype) for x in (cotangent, *operands)]
    at_once, exported = (jax.export.export(each, platforms=["cpu"])(*shapes) for each in (plain, program))
    restored = jax.export.deserialize(exported.serialize())
    two_rows = [np.asarray(x)[1:] for x in (cotangent, *operands)]

    assert restored.platforms == ("cpu",)
    assert [x.shape for x in at_once.out_avals] == [x.shape for x in exported.out_avals]
    agree(restored.call(*two_rows), [x[1:] for x in expected])


@functools.cache
def product_by(module):
    """A product of the Hessian by `jvp` of a gradient, as in the documentation; in float64."""
    rng = CASE.generator("hessian")
    tangents = tuple(rng.standard_normal(x.shape) for x in CASE.draw())
    weights = rng.standard_normal((*CASE.draw().query.shape[:3], CASE.value_dim))

    def product(operands, tangents):
        def objective(operands):
            return (module.native_sparse_attention(*operands, config=CONFIG) * weights).sum()

        return jax.jvp(jax.grad(objective), (operands,), (tangents,))[1]

    with jax.enable_x64(True):
        return jax.jit(product)(tuple(CASE.draw()), tangents)


@pytest.mark.parametrize("sizes", [Sizes(), Sizes(dense_blocks=0)], ids=["at_once", "by_branch"])
def test_hessian_vector_products_are_those_of_the_reference(sizes, monkeypatch):
    """With the operation's own selection."""
    right = xla.native_sparse_attention
    monkeypatch.setattr(xla, "native_sparse_attention", functools.partial(right, sizes=sizes))

    found = product_by.__wrapped__(attention)
    for ours, theirs in zip(found, product_by(reference), strict=True):
        assert np.abs(theirs).max() > 0.1
        assert distance(np.asarray(ours), np.asarray(theirs)) < 1e-12 * max(1, np.abs(theirs).max())


def test_hessian_vector_products_of_importance_scores():
    """JAX once refused the `jvp` of their gradient, which the documentation promises of every operation."""
    rng = CASE.generator("hessian of importance")
    operands = tuple(CASE.draw()[:2])
    tangents = tuple(rng.standard_normal(x.shape) for x in operands)

    def product(module, operands, tangents):
        def objective(operands):
            scores = module.importance_scores(*operands, config=CONFIG)
            return jax.numpy.sin(jax.numpy.where(jax.numpy.isfinite(scores), scores, 0)).sum()

        return jax.jvp(jax.grad(objective), (operands,), (tangents,))[1]

    with jax.enable_x64(True):
        found, expected = (
            jax.jit(functools.partial(product, module))(operands, tangents)
            for module in (attention, reference)
        )
    for ours, theirs in zip(found, expected, strict=True):
        assert np.abs(theirs).max() > 0.1
        assert distance(np.asarray(ours), np.asarray(theirs)) < 1e-12 * max(1, np.abs(theirs).max())


@pytest.mark.parametrize("name", ["native_sparse_attention", "window_attention"])
def test_forward_mode_of_an_operation_is_refused(operands, name):
    """`nsa_jax.attention` says so; the error is JAX's."""
    arrays = operands if name == "native_sparse_attention" else (operands[0], *operands[5:7])
    run = functools.partial(getattr(attention, name), config=CONFIG)
    with pytest.raises(TypeError, match="can't apply forward-mode autodiff"):
        jax.jvp(run, arrays, arrays)
