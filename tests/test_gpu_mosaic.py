"""On a Hopper GPU: the selected branch by the Mosaic GPU kernels, against the oracle and against Triton."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

pytest.importorskip("jax_triton", reason="needs jax-triton", exc_type=ImportError)

from selected_problem import problem

import nsa_jax
from nsa_jax import budget, reference
from nsa_jax.config import NSAConfig
from nsa_jax.kernels.mosaic_gpu import gradients_in_parts

pytestmark = pytest.mark.gpu


@pytest.fixture
def in_parts(monkeypatch):
    """A function that forces the queries' gradients to come in parts, or not to."""

    def force(forced: bool, part_bytes: int = gradients_in_parts.PART_BYTES):
        monkeypatch.setattr(gradients_in_parts, "FEWEST_PAIRS", 0)
        monkeypatch.setattr(gradients_in_parts, "MOST_SHARED", np.inf if forced else 0)
        monkeypatch.setattr(gradients_in_parts, "PART_BYTES", part_bytes)
        jax.clear_caches()

    yield force
    monkeypatch.undo()
    jax.clear_caches()


SHAPES = {
    "plain": {},
    "odd_lengths": dict(batch=2, length=333),
    "last_queries": dict(length=77, keys=1000),
    "four_heads": dict(heads=4),
    "twelve_heads": dict(heads=12, kv_heads=2),
    "one_head": dict(heads=1),
    "dims_of_64": dict(key_dim=64, value_dim=64),
    "wide_keys": dict(key_dim=192),
    "float16": dict(dtype="float16"),
    "blocks_of_32": dict(block=32),
    "blocks_of_128": dict(block=128, length=1500),
    "forty_blocks": dict(slots=40, length=3000, kv_heads=1),
    "packed": dict(packed=True),
    "packed_wide_keys": dict(packed=True, key_dim=192),
    "packed_four_heads": dict(packed=True, heads=4, dtype="float16"),
    "packed_blocks_of_32": dict(packed=True, block=32),
    "packed_blocks_of_128": dict(packed=True, block=128),
}


triton = functools.partial(nsa_jax.selected_attention, implementation="triton")
mosaic = functools.partial(nsa_jax.selected_attention, implementation="mosaic_gpu")


# Shapes whose queries' gradients may come in parts, with most bytes of a chunk. A query of 16 slots and 16
# heads takes 64 KB: so 2^24 bytes are 256 queries of a KV head, and 2^26 three heads of 333 queries.
IN_PARTS = {
    "plain": (2**31, 2**24),
    "odd_lengths": (2**26, 2**23),
    "last_queries": (2**31,),
    "twelve_heads": (2**24,),
    "dims_of_64": (2**23,),
    "float16": (2**24,),
    "forty_blocks": (2**27,),
    "packed": (2**31, 2**24),
}


@pytest.mark.parametrize("name", SHAPES)
def test_values_and_gradients_equal_the_oracle(name, in_parts):
    in_parts(False)
    check_against_oracle(name)


@pytest.mark.parametrize(
    ("name", "part_bytes"), [(name, x) for name, several in IN_PARTS.items() for x in several]
)
def test_gradients_in_parts_equal_the_oracle(name, part_bytes, in_parts):
    in_parts(True, part_bytes)
    check_against_oracle(name)


def check_against_oracle(name):
    arrays, _, gradients = problem(**SHAPES[name])
    oracle = jax.jit(functools.partial(gradients, reference.selected_attention))
    ours = jax.jit(functools.partial(gradients, mosaic))

    found, same = ours(*arrays), oracle(*arrays)
    exact = oracle(*(x.astype(jnp.float32) for x in arrays))

    for name, x, theirs, right in zip(("out", "lse", "dq", "dk", "dv"), found, same, exact, strict=True):
        theirs = right if name == "lse" else theirs  # the kernels compute it in float32
        allowed = budget.allowance(theirs, right, float(jnp.finfo(x.dtype).eps))
        assert budget.distance(x, right) <= allowed, name
    again = ours(*arrays)
    assert all((x == y).all() for x, y in zip(found, again, strict=True))


@pytest.mark.parametrize("length", [65536, 131072])
@pytest.mark.parametrize("distribution", ["random", "alike"])
@pytest.mark.parametrize("forced", [True, False], ids=["in_parts", "by_two_kernels"])
def test_long_rows_equal_triton_and_repeat_bitwise(length, distribution, forced, in_parts):
    in_parts(forced)
    arrays, blocks, gradients = problem(length=length, kv_heads=1)
    if distribution == "alike":  # 32 neighbours choose the same blocks
        blocks = jnp.repeat(blocks[:, ::32], 32, axis=1)

        def gradients(attend, *arrays):
            def both(*arrays):
                return tuple(attend(*arrays, blocks, config=NSAConfig()))

            found, pull_back = jax.vjp(both, *arrays)
            return *found, *pull_back(found)

    ours, theirs = (jax.jit(functools.partial(gradients, x)) for x in (mosaic, triton))

    found, other = ours(*arrays), theirs(*arrays)

    for x, y in zip(found, other, strict=True):
        finite = jnp.isfinite(y)
        assert (jnp.isfinite(x) == finite).all()
        x, y = (jnp.where(finite, z, 0).astype(jnp.float32) for z in (x, y))
        assert jnp.linalg.norm(x - y) <= 8 * float(jnp.finfo("bfloat16").eps) * jnp.linalg.norm(y)
    for _ in range(20):
        again = ours(*arrays)
        assert all(bool((x == y).all()) for x, y in zip(found, again, strict=True))


def held_blocks(length, tokens):
    """16 blocks of each query, slot by slot the same for `tokens` queries in a row: [1, T, 1, 16]."""
    slot, own = jnp.arange(16), jnp.arange(length)[:, None] // 64
    run = (jnp.arange(length)[:, None] + tokens * slot // 16) // tokens
    drawn = jax.random.bits(jax.random.key(9), (length + 1, 16), "uint32")[run, slot]
    number = (drawn % jnp.maximum((own - slot) // 16 + 1, 1).astype("uint32")).astype("int32")
    found = jnp.sort(jnp.where(slot <= own, 16 * number + slot, 2**30), -1)  # slots have different blocks
    return jnp.where(found == 2**30, -1, found)[None, :, None]


@pytest.mark.parametrize("forced", [True, False], ids=["in_parts", "by_two_kernels"])
def test_200_launches_at_each_overlap_give_the_same_bits(forced, in_parts):
    """From neighbours that share blocks by chance alone, over five steps, to nearly all of them."""
    in_parts(forced)
    arrays, *_ = problem(length=65536, kv_heads=1)
    cotangent = jax.random.normal(jax.random.key(8), arrays[0].shape, "bfloat16")

    def gradients(attend, blocks, cotangent, *arrays):
        def out(*arrays):
            return attend(*arrays, blocks, config=NSAConfig())[0]

        found, pull_back = jax.vjp(out, *arrays)
        return found, *pull_back(cotangent)

    ours, theirs = (jax.jit(functools.partial(gradients, x)) for x in (mosaic, triton))
    shares = []
    for tokens in (1, 2, 3, 5, 8, 16, 32):
        blocks = held_blocks(65536, tokens)
        shares.append(float((blocks[:, 1:, :, :, None] == blocks[:, :-1, :, None]).any(-1).mean()))
        call = blocks, cotangent, *arrays
        first, expected = ours(*call), theirs(*call)
        for x, y in zip(first, expected, strict=True):
            x, y = x.astype(jnp.float32), y.astype(jnp.float32)
            distance = jnp.linalg.norm(x - y)
            assert distance <= 8 * float(jnp.finfo("bfloat16").eps) * jnp.linalg.norm(y), tokens
        same = [
            jnp.stack([(x == y).all() for x, y in zip(first, ours(*call), strict=True)]) for _ in range(200)
        ]
        assert jnp.stack(same).all(), tokens
    assert shares == sorted(shares)
    assert shares[0] < 0.15
    assert shares[-1] > 0.95


def test_the_run_time_choice_gives_what_it_chose(in_parts, monkeypatch):
    """Bitwise: in parts where neighbours choose at random, by two kernels where they choose alike."""
    arrays, blocks, _ = problem(length=32768, kv_heads=1)
    alike = jnp.repeat(blocks[:, ::32], 32, axis=1)
    cotangent = jax.random.normal(jax.random.key(8), arrays[0].shape, "bfloat16")

    def gradients(query, key, value, blocks):
        def attend(*arrays):
            return mosaic(*arrays, blocks, config=NSAConfig()).out

        return jax.vjp(attend, query, key, value)[1](cotangent)

    found = {}
    for forced, most_shared in (("yes", np.inf), ("no", 0), ("neither", gradients_in_parts.MOST_SHARED)):
        in_parts(True)
        monkeypatch.setattr(gradients_in_parts, "MOST_SHARED", most_shared)
        run = jax.jit(lambda *x: gradients(*x))
        found[forced] = [run(*arrays, x) for x in (blocks, alike)]

    for i, expected in enumerate(("yes", "no")):
        assert all((x == y).all() for x, y in zip(found["neither"][i], found[expected][i], strict=True))
    assert not all((x == y).all() for x, y in zip(found["yes"][0], found["no"][0], strict=True))


@pytest.mark.parametrize(("length", "heads"), [(1500, 64), (6500, 60)], ids=["short", "15_heads"])
@pytest.mark.parametrize("bad", [False, True], ids=["finite", "not_finite"])
def test_whole_operation_equals_triton(length, heads, bad):
    """Also where a compressed key and a value of the window are not finite: the same results are NaN."""
    config, blocks = NSAConfig(), (length - 32) // 16 + 1
    keys = jax.random.split(jax.random.key(0), 9)
    shapes = [(length, heads, 128), *[(blocks, 4, 128)] * 2, *[(length, 4, 128)] * 4]
    arrays = [
        jax.random.normal(key, (1, *shape), "bfloat16") for key, shape in zip(keys, shapes, strict=False)
    ]
    chosen = nsa_jax.select_blocks(*arrays[:2], config=config, implementation="triton")
    if bad:
        arrays[1] = arrays[1].at[0, blocks - 20, 1, 3].set(jnp.nan)
        arrays[6] = arrays[6].at[0, length - 100, 2, 5].set(jnp.inf)
    arrays.append(jax.random.uniform(keys[7], (1, length, heads, 3), "float32").astype("bfloat16"))
    cotangent = jax.random.normal(keys[8], (1, length, heads, 128), "bfloat16")

    def run(implementation):
        def operation(*arrays):
            return nsa_jax.native_sparse_attention(
                *arrays, block_indices=chosen, config=config, implementation=implementation
            )

        out, pull_back = jax.vjp(operation, *arrays)
        return out, *pull_back(cotangent)

    found, other = (jax.jit(functools.partial(run, x))() for x in ("mosaic_gpu", "triton"))

    eps = float(jnp.finfo("bfloat16").eps)
    for x, y in zip(found, other, strict=True):
        x, y = (np.asarray(array, np.float64) for array in (x, y))
        finite = np.isfinite(y)
        assert (np.isnan(x) == np.isnan(y)).all()
        assert (x[~finite] == y[~finite])[~np.isnan(y[~finite])].all()
        x, y = x[finite], y[finite]
        assert budget.distance(x, y) <= 2 * 8 * eps * budget.size(y)
        assert np.linalg.norm(x - y) <= eps * np.linalg.norm(y)
    assert bad == (not np.isfinite(np.asarray(found[0], np.float32)).all())


@pytest.mark.parametrize("forced", [True, False], ids=["in_parts", "by_two_kernels"])
def test_what_is_not_a_number_reaches_only_those_who_see_it(forced, in_parts):
    in_parts(forced)
    (query, key, value), blocks, gradients = problem(length=2000)
    ours = jax.jit(functools.partial(gradients, mosaic))
    bad = 1234
    finite = ours(query, key, value)

    found = ours(query, key.at[0, bad, 1, 3].set(jnp.nan), value.at[0, bad, 2].set(jnp.inf))

    tokens = np.arange(2000)[None, :, None]
    sees = (np.asarray(blocks) == bad // 64).any(-1) & (tokens >= bad)  # [B, T, K]
    for head in (0, 3):  # nothing is wrong there
        rows = slice(16 * head, 16 * head + 16)
        assert (found[0][:, :, rows] == finite[0][:, :, rows]).all()
        assert (found[3][:, :, head] == finite[3][:, :, head]).all()
    for head in (1, 2):
        rows = slice(16 * head, 16 * head + 16)
        others = ~sees[:, :, head]  # computed again, so in another order
        assert budget.distance(found[0][:, :, rows][others], finite[0][:, :, rows][others]) <= 0.05
        assert jnp.isfinite(found[2][:, :, rows][others]).all()
        assert not np.asarray(jnp.isfinite(found[0][:, :, rows]).all((2, 3)))[sees[:, :, head]].any()


def test_vmap_equals_the_batch():
    (query, key, value), blocks, _ = problem(batch=2, length=300)
    attend = functools.partial(nsa_jax.selected_attention, config=NSAConfig(), implementation="mosaic_gpu")

    together = attend(query, key, value, blocks)
    mapped = jax.vmap(lambda *x: attend(*(y[None] for y in x)))(query, key, value, blocks)

    assert (mapped.out[:, 0] == together.out).all()
    assert (mapped.lse[:, 0] == together.lse).all()
