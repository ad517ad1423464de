"""Decode steps of dense and window layers by the Triton kernels in the interpreter; run as a program.

Against NumPy in float64, on caches whose unused slots hold NaN; float32, poisoned outputs.
"""

from triton_interpreter import interpreted  # isort: skip

import dataclasses
import functools
import sys
import time

import decode_by_loops
import jax
import jax.numpy as jnp
import numpy as np

from nsa_jax import cache
from nsa_jax.kernels.triton.decode import dense_step
from nsa_jax.layout.quantised import fields, quantised

NAMES = ("key", "value")

# Of the largest value: the budget of `parity` in float32, without what it allows on top.
TOLERANCE = 16 * float(np.finfo(np.float32).eps)


@dataclasses.dataclass(frozen=True)
class Case:
    """A step of `num_new` tokens on rows of these lengths."""

    lengths: tuple[int, ...]
    num_new: int = 1
    window_size: int | None = None
    num_tokens: tuple[int, ...] | None = None
    max_length: int = 120
    num_heads: int = 8
    num_kv_heads: int = 2
    key_dim: int = 16
    value_dim: int = 16
    sizes: tuple[tuple[str, int], ...] = (("keys", 16), ("parts", 3))
    kept: str = "float32"  # dtype of the cache


CASES = {
    "one token": Case((100, 37, 99)),
    "short rows": Case((0, 1, 16, 17)),
    "a full row": Case((120, 119, 30)),
    "no room for all": Case((118, 63, 117), 3),
    "some of four tokens": Case((107, 63, 3), 4, num_tokens=(4, 2, 0)),
    "eight tokens, two pieces a dim": Case((107, 63), 8, num_heads=6, key_dim=48, value_dim=96),
    "groups of rows": Case((107, 0), 8, num_heads=16, sizes=(("rows", 16), ("groups", 4), ("parts", 2))),
    "a ring": Case((0, 3, 22, 23, 100), window_size=23),
    "a ring, some of eight tokens": Case((3, 22, 99), 8, 23, num_tokens=(0, 8, 5)),
    "a window shorter than the step": Case((2, 50), 8, 3, value_dim=32),
    "an array shorter than the window": Case((117, 119, 30), 3, 121),
    "int8": Case((107, 63, 3), 4, num_tokens=(4, 2, 0), key_dim=48, kept="int8"),
    "int8, a ring": Case((3, 22, 99), 8, 23, num_tokens=(0, 8, 5), kept="int8"),
}


def draw(case: Case, seed: int = 0):
    """Cache, query, key and value, in float32; NaN where nothing is held."""
    rng = np.random.default_rng(seed)
    batch, heads = len(case.lengths), case.num_kv_heads

    def normal(length, num_heads, dim):
        return rng.standard_normal((batch, length, num_heads, dim)).astype(np.float32)

    held = cache.init_dense_cache(
        batch, case.max_length, num_kv_heads=heads, key_dim=case.key_dim, value_dim=case.value_dim,
        dtype=case.kept, window_size=case.window_size,
    )  # fmt: skip
    lengths = np.asarray(case.lengths, np.int32)
    slot = np.arange(held.key.shape[1])[None, :, None, None]
    there = slot < lengths[:, None, None, None]
    shapes = dict(key=held.key.shape[1:], value=held.value.shape[1:])
    filled = {name: np.where(there, normal(*shape), np.float32(np.nan)) for name, shape in shapes.items()}
    if case.kept == "int8":
        filled = fields(jax.jit(lambda: {name: quantised(x, jnp.int8) for name, x in filled.items()})())
    held = held._replace(**filled, lengths=lengths)
    dims = ((case.num_heads, case.key_dim), (heads, case.key_dim), (heads, case.value_dim))
    return jax.device_put((held, *(normal(case.num_new, *dim) for dim in dims)))


def number_of(case: Case):
    """`num_tokens` of a step."""
    return None if case.num_tokens is None else jnp.asarray(case.num_tokens, jnp.int32)


def by_kernels(case: Case, operands):
    """The step by the kernels in pieces of the case's sizes."""
    held, query, *_ = operands
    sizes = dense_step.sizes_of_dense_step(held, query)._replace(**dict(case.sizes))

    @jax.jit
    def step(*operands):
        return dense_step.dense_decode_step(
            *operands, number_of(case), case.window_size, case.key_dim**-0.5, sizes=sizes
        )

    with interpreted():
        return cache.DenseStep(*jax.block_until_ready(step(*operands)))


def oracle(case: Case, held: cache.DenseCache, query, key, value) -> cache.DenseStep:
    """The step, token by token and head by head."""
    arrays = {name: None if x is None else np.array(x) for name, x in held._asdict().items()}
    keys, lengths, overflowed = (arrays[name] for name in ("key", "lengths", "overflowed"))
    query, key, value = map(np.asarray, (query, key, value))
    out = np.zeros((*query.shape[:3], case.value_dim))
    window, size = case.window_size or case.max_length, keys.shape[1]
    full = case.window_size is None or size < window
    for b, length in enumerate(case.lengths):
        wanted = case.num_new if case.num_tokens is None else case.num_tokens[b]
        overflowed[b] = full and length + wanted > size
        number = 0 if overflowed[b] else wanted
        lengths[b] += number
        for t, n in np.ndindex(number, case.num_heads):
            head, at = n * case.num_kv_heads // case.num_heads, length + t
            for name, token in zip(NAMES, (key, value), strict=True):
                decode_by_loops.store(arrays, name, (b, at % size), token[b, t])
            kept = cache.DenseCache(**arrays)
            keys, values = (decode_by_loops.read(kept, name) for name in NAMES)
            slots = np.arange(max(at - window + 1, 0), at + 1) % size
            logits = keys[b, slots, head].astype(float) @ query[b, t, n].astype(float) * case.key_dim**-0.5
            weights = np.exp(logits - logits.max())
            out[b, t, n] = weights @ values[b, slots, head] / weights.sum()
    return cache.DenseStep(out, cache.DenseCache(**arrays))


def check_case(name: str) -> float:
    """Output and cache."""
    case = CASES[name]
    operands = draw(case)
    found, expected = by_kernels(case, operands), oracle(case, *operands)
    error = float(np.abs(np.asarray(found.out) - expected.out).max())
    assert error <= TOLERANCE * max(1, float(np.abs(expected.out).max())), (name, error)
    for field, got, want in zip(cache.DenseCache._fields, found.cache, expected.cache, strict=True):
        if got is not None:
            rtol = 2.0**-22 if field.endswith("scale") else 0  # as in `triton_decode_program`
            np.testing.assert_allclose(got, want, rtol, 0, err_msg=f"{name}: {field}")
    return error


def check_not_a_number() -> float:
    """NaN in one row, KV head, later token or token that has left the window stays there."""
    case = Case((40, 63, 30), 4, window_size=23)
    clean = draw(case)
    rows = np.asarray(by_kernels(case, clean).out)
    held, query, key, value = jax.tree.map(np.array, clean)
    slot = (63 - 22 + 1) % held.key.shape[1]  # of row 1, seen by its tokens 0 and 1 only
    held.key[0] = query[0, 1] = np.nan
    held.value[1, slot, 0], held.value[1, (63 - 23) % held.key.shape[1]] = np.inf, np.nan
    value[1, 2, 1] = np.nan  # the second KV head of row 1, from token 2 on
    out = np.asarray(by_kernels(case, (held, query, key, value)).out)
    assert np.isnan(out[0]).all()
    assert not np.isfinite(out[1, :2, :4]).any()
    np.testing.assert_array_equal(out[1, 2:, :4], rows[1, 2:, :4])
    np.testing.assert_array_equal(out[1, :2, 4:], rows[1, :2, 4:])
    assert np.isnan(out[1, 2:, 4:]).all()
    np.testing.assert_array_equal(out[2], rows[2])
    return 0.0


def check_public() -> float:
    """`nsa_jax.cache.dense_decode_step` runs these kernels, under `vmap` as one larger batch."""
    case = Case((107, 63), 2, sizes=())
    operands = draw(case)
    more = jax.tree.map(lambda x: np.stack([x, x[::-1]]), operands)

    def step(*operands):
        return cache.dense_decode_step(*operands, implementation="triton")

    with interpreted():
        found, mapped = step(*operands), jax.jit(jax.vmap(step))(*more)
    for got, both, want in zip(
        *map(jax.tree.leaves, (found, mapped, by_kernels(case, operands))), strict=True
    ):
        np.testing.assert_array_equal(got, want)
        np.testing.assert_array_equal(both[0], want)
        np.testing.assert_array_equal(both[1], want[::-1])
    return 0.0


def main() -> None:
    """Runs every check, or those named, and reports each."""
    checks = {f"case {name}": functools.partial(check_case, name) for name in CASES}
    checks |= {"public": check_public, "not a number": check_not_a_number}
    for name in sys.argv[1:] or list(checks):
        start = time.perf_counter()
        error = checks[name]()
        print(f"{name}: ok, {error:.1e}, {time.perf_counter() - start:.1f} s", flush=True)


if __name__ == "__main__":
    main()
