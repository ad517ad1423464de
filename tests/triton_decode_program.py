"""Decode steps by the Triton kernels in the interpreter, against loops in float64; run as a program.

Through `nsa_jax.cache.decode_step`, on a cache whose unused slots hold NaN; float32, poisoned outputs.
"""

from triton_interpreter import interpreted  # isort: skip

import dataclasses
import functools
import sys
import time
from typing import Any
from unittest import mock

import decode_by_loops
import jax
import jax.numpy as jnp
import numpy as np
import triton
import triton.language as tl

from nsa_jax import cache
from nsa_jax.cache import Compression, ResidualMLP, Rotation, TokenKeysValues
from nsa_jax.compression import compress_blocks
from nsa_jax.config import BRANCHES, NSAConfig
from nsa_jax.kernels.triton.decode import step as steps
from nsa_jax.kernels.triton.decode.parts import ranks
from nsa_jax.kernels.triton.decode.step import GivenBlocks
from nsa_jax.kernels.triton.launch import launch
from nsa_jax.layout import slots

PLAIN = NSAConfig(
    compression_block_size=8, compression_stride=4, selection_block_size=16, num_selected_blocks=4,
    window_size=16, num_initial_blocks=1, num_local_blocks=1,
)  # fmt: skip
ODD = NSAConfig(  # blocks of 9 strides, which are no power of two; three windows a compression block
    compression_block_size=6, compression_stride=2, selection_block_size=18, num_selected_blocks=5,
    window_size=7, num_initial_blocks=0, num_local_blocks=2,
)  # fmt: skip
ALIKE = NSAConfig(  # one compression block a selection block
    compression_block_size=4, compression_stride=4, selection_block_size=4, num_selected_blocks=3,
    window_size=9, num_initial_blocks=1, num_local_blocks=1,
)  # fmt: skip
MEAN = Compression()
# Of the largest value: the budget of `parity` in float32, without what it allows on top.
TOLERANCE = 16 * float(np.finfo(np.float32).eps)


@dataclasses.dataclass(frozen=True)
class Case:
    """A step of `num_new` tokens on rows of these lengths."""

    lengths: tuple[int, ...]
    num_new: int = 1
    config: NSAConfig = PLAIN
    num_tokens: tuple[int, ...] | None = None
    max_length: int = 120
    num_heads: int = 4
    num_kv_heads: int = 1
    key_dim: int = 16
    value_dim: int = 16
    equal: bool = False  # all keys are alike: every score ties
    shared: bool = False
    branches: tuple[str, ...] = BRANCHES
    compress: Any = MEAN
    given: bool = False  # the blocks are drawn, not chosen by scores
    sizes: tuple[tuple[str, int], ...] = ()
    merged_at_once: int = steps.MERGED_AT_ONCE
    kept: str = "float32"  # dtype of the cache


def twice(key_windows, value_windows, first_positions):
    """A compressor that is a function, and sees positions."""
    angle = first_positions[:, :, None, None].astype(key_windows.dtype) / 50
    return key_windows.mean(2) * (1 + angle), value_windows[:, :, 0] * 2


def mlp(size: int, dim: int, units: int, seed: int) -> ResidualMLP:
    """A `ResidualMLP` of random weights."""
    rng = np.random.default_rng(seed)
    shapes = ((size, dim), (size * dim, units), (units,), (units, dim), (dim,))
    return ResidualMLP(*(jnp.asarray(rng.standard_normal(x) / x[0] ** 0.5, jnp.float32) for x in shapes))


def rotation(pairs: int) -> Rotation:
    """A `Rotation` whose last pairs turn slowly."""
    return Rotation.of(1000.0 ** (-np.arange(pairs) / pairs), 1.25)


OF_TWO = dict(num_heads=8, num_kv_heads=2)
CASES = {
    "one token": Case((100, 37, 99), **OF_TWO),
    "short rows": Case((0, 7, 8)),
    "a full row": Case((120, 119, 30)),
    "equal keys": Case((100, 71, 112), equal=True),
    "four tokens": Case((107, 63, 3), 4, num_tokens=(4, 2, 0)),
    "no room for all": Case((118, 63, 117), 4, **OF_TWO),
    "eight tokens": Case((107, 63), 8, num_heads=3, key_dim=48, value_dim=48),
    "one head": Case((90, 15), 2, num_heads=2, num_kv_heads=2),
    "shared": Case((107, 20), 3, shared=True, **OF_TWO),
    "a function": Case((107, 63), 5, compress=jax.tree_util.Partial(twice)),
    "rotated means": Case((107, 20), 2, compress=Compression(rotation=rotation(8))),
    "MLPs, many blocks": Case(
        (107, 64), 4, num_heads=2, num_kv_heads=2, key_dim=48, value_dim=16, config=ODD, num_tokens=(4, 3),
        compress=Compression(mlp(6, 48, 40, 0), mlp(6, 16, 20, 1), rotation(20)),
    ),
    "an MLP of values": Case((107, 63), 5, compress=Compression(None, mlp(8, 16, 24, 1))),
    "odd blocks": Case((100, 64), 5, config=ODD),
    "odd blocks, equal keys": Case((110, 83), 5, config=ODD, equal=True),
    "one key a block": Case((101, 64), 6, config=ALIKE, num_heads=1),
    "groups of rows": Case((107, 63), 8, num_heads=8, sizes=(("rows", 16), ("groups", 4))),
    "many lists": Case(  # the first share takes the best block, which may be in the last list
        (111, 95), 2, config=dataclasses.replace(PLAIN, num_initial_blocks=0), sizes=(
            ("keys", 16), ("list_blocks", 4), ("shares", 2), ("win_parts", 1), ("slc_blocks", 1),
        ),
    ),
    "few parts": Case((111, 95), 2, sizes=(
        ("keys", 16), ("list_blocks", 4), ("cmp_parts", 1), ("shares", 1), ("win_parts", 1),
    ), merged_at_once=16),
    "three heads of two": Case(
        (107, 63), 2, num_heads=6, num_kv_heads=2, sizes=(("shares", 2), ("win_parts", 1)),
    ),
    "given blocks": Case((37, 100), given=True),
    "given blocks of four tokens": Case(
        (90, 63, 117, 20), 4, config=ODD, num_tokens=(4, 2, 4, 0), given=True, **OF_TWO,
        sizes=(("keys", 16), ("list_blocks", 4), ("shares", 2), ("win_parts", 1), ("slc_blocks", 1)),
    ),
    "the selected branch alone": Case((37, 100, 120), given=True, branches=("slc",), compress=None),
    "no compressed branch": Case(
        (90, 63, 117, 20), 4, num_tokens=(4, 2, 4, 0), given=True, branches=("slc", "win"), compress=None,
    ),
    "no compressed branch, shared": Case(
        (107, 20), 3, config=ODD, given=True, shared=True, branches=("slc", "win"), compress=None,
    ),
    "no window": Case((107, 20), 2, branches=("cmp", "slc")),
    "int8": Case(
        (107, 63, 117), 4, num_tokens=(4, 2, 4), compress=Compression(rotation=rotation(8)), kept="int8",
        **OF_TWO,
    ),
    "int8, shared, two pieces a dim": Case((107, 20), 3, key_dim=48, shared=True, kept="int8"),
}  # fmt: skip


def drawn_blocks(case: Case):
    """Selections of any size and order, some with a block twice, also of blocks that a query does not reach.

    None if scores choose.
    """
    if not case.given:
        return None
    rng, slots = np.random.default_rng(1), case.config.num_selected_blocks
    shape = (len(case.lengths), case.num_new, case.num_kv_heads)
    blocks = np.full((*shape, slots), -1, np.int32)
    for place in np.ndindex(shape):
        number = rng.integers(slots + 1)
        every = -(-case.max_length // case.config.selection_block_size)
        blocks[place][:number] = rng.choice(every, number, replace=False)
        if number > 1 and rng.random() < 0.3:
            blocks[place][number - 1] = blocks[place][0]
    return blocks


def draw(case: Case, seed: int = 0):
    """Cache, query, tokens and gates, in float32; NaN where nothing is held."""
    rng = np.random.default_rng(seed)
    batch, heads = len(case.lengths), case.num_kv_heads

    def normal(*shape):
        return rng.standard_normal(shape).astype(np.float32)

    def tokens(length):
        arrays = [normal(batch, length, heads, dim) for dim in (case.key_dim, case.value_dim) * 3]
        if case.equal:
            arrays = [x if i % 2 else np.ones_like(x) for i, x in enumerate(arrays)]
        tokens = TokenKeysValues(*(arrays[:4] if case.shared or "win" not in case.branches else arrays))
        return tokens if "cmp" in case.branches else tokens._replace(key_cmp=None, value_cmp=None)

    def poisoned(x):
        return np.full(x.shape, {"float32": np.nan, "int8": 113}.get(x.dtype.name, 0), x.dtype)

    empty = jax.eval_shape(
        lambda: cache.init_cache(
            batch, case.max_length, num_kv_heads=heads, key_dim=case.key_dim, value_dim=case.value_dim,
            config=case.config, dtype=case.kept, raw_dtype=jnp.float32, share_keys_values=case.shared,
            branches=case.branches,
        )
    )  # fmt: skip
    held = decode_by_loops.append(
        jax.tree.map(poisoned, empty), tokens(max(case.lengths)), case.lengths, case.config, case.compress
    )
    held = jax.tree.map(lambda x: x.astype(np.float32) if x.dtype == np.float64 else x, held)
    query = normal(batch, case.num_new, case.num_heads, case.key_dim)
    if case.equal:  # products are exact, or a BLAS that adds up in two orders breaks a tie
        query = np.round(4 * query) / 4
    several = len(case.branches) > 1
    gates = normal(batch, case.num_new, case.num_heads, len(case.branches)) if several else None
    return held, query, tokens(case.num_new), gates


def by_loops(case: Case, operands) -> decode_by_loops.Step:
    """The step in NumPy."""
    number = (case.num_new,) * len(case.lengths) if case.num_tokens is None else case.num_tokens
    return decode_by_loops.decode_step(*operands, number, drawn_blocks(case), case.config, case.compress)


def by_kernels(case: Case, operands):
    """The step by the kernels in pieces of the case's sizes."""
    held, query, *_ = operands = jax.tree.map(jnp.asarray, operands)
    number = None if case.num_tokens is None else jnp.asarray(case.num_tokens, jnp.int32)
    blocks = jax.tree.map(jnp.asarray, drawn_blocks(case))
    sizes = steps.sizes_of_step(held, query, case.config)._replace(**dict(case.sizes))

    def attend(held, query, tokens, gates, number):
        compress = case.compress
        if compress is not None and not isinstance(compress, Compression):
            windows = slots.windows_of_step(held, tokens, number, case.config)
            compress = GivenBlocks(*compress_blocks(compress, *windows))
        scale = case.key_dim**-0.5
        return steps.decode_step(
            held, query, tokens, gates, number, compress, case.config, scale, sizes=sizes,
            block_indices=blocks,
        )  # fmt: skip

    with interpreted(), mock.patch.object(steps, "MERGED_AT_ONCE", case.merged_at_once):
        return jax.block_until_ready(jax.jit(attend)(*operands, number))


def check_case(name: str) -> float:
    """Output, cache and blocks."""
    case = CASES[name]
    operands = draw(case)
    found, expected = by_kernels(case, operands), by_loops(case, operands)
    assert np.sort(found.blocks).tolist() == np.sort(expected.blocks).tolist(), name
    error = float(np.abs(np.asarray(found.out) - expected.out).max())
    assert error <= TOLERANCE * max(1, float(np.abs(expected.out).max())), (name, error)
    for field, got, want in zip(cache.NSACache._fields, found.cache, expected.cache, strict=True):
        if got is not None:
            # Compressed blocks have been summed up in float32; all else is copied, or rounded as in float64.
            summed = "_cmp" in field and want.dtype.kind == "f"
            atol = TOLERANCE * float(np.nanmax(np.abs(want))) if summed else 0
            # A scale is a product with 1 / 127, which is rounded, too.
            rtol = 2.0**-22 if field.endswith("scale") else 1e-7
            np.testing.assert_allclose(got, want, rtol=rtol, atol=atol, err_msg=f"{name}: {field}")
    return error


def spoilt(x, value, place) -> np.ndarray:
    """A copy with another value there."""
    x = np.array(x)
    x[place] = value
    return x


def check_not_a_number(kept: str = "float32") -> float:
    """NaN in one row, KV head or later token stays there."""
    case = Case((107, 63, 30), 4, kept=kept, **OF_TWO)
    clean = draw(case)
    rows = np.asarray(by_kernels(case, clean).out)
    held, query, tokens, gates = clean
    tokens = tokens._replace(
        key_cmp=spoilt(tokens.key_cmp, np.nan, (0, 0)),  # all of row 0
        value_slc=spoilt(tokens.value_slc, np.nan, (1, 2, 1)),  # the second KV head of row 1, from token 2 on
        value_win=spoilt(tokens.value_win, np.inf, (1, 2, 1)),
        value_cmp=spoilt(tokens.value_cmp, np.nan, (1, 0, 1)),  # its block is complete with token 0
    )
    out = np.asarray(by_kernels(case, (held, spoilt(query, np.nan, (0, 1)), tokens, gates)).out)
    assert np.isnan(out[1, :, 4:]).all()
    np.testing.assert_array_equal(out[2], rows[2])
    np.testing.assert_array_equal(out[1, :, :4], rows[1, :, :4])
    if kept != "float32":
        return 0.0
    late = Case((107, 61), 4)  # the block of row 1 is complete with token 2
    clean = draw(late)
    rows = np.asarray(by_kernels(late, clean).out)
    held, query, tokens, gates = clean
    tokens = tokens._replace(value_cmp=spoilt(tokens.value_cmp, np.nan, (1, 2)))
    out = np.asarray(by_kernels(late, (held, query, tokens, gates)).out)
    np.testing.assert_array_equal(out[1, :2], rows[1, :2])
    assert np.isnan(out[1, 2:]).all()
    return 0.0


@triton.jit
def ranks_kernel(bits, rank, live, LENGTH: tl.constexpr):
    """The ranks of `bits`, of which `live` count."""
    x = tl.arange(0, LENGTH)
    tl.store(rank + x, ranks(tl.load(bits + x), live, LENGTH))


def check_public() -> float:
    """`nsa_jax.cache.decode_step` runs these kernels."""
    case = Case((107, 63), 2, **OF_TWO)
    operands = draw(case)
    with interpreted():
        settings = dict(config=case.config, compress=case.compress, implementation="triton")
        found = cache.decode_step(*operands, **settings)
    expected = jax.tree.leaves(by_kernels(case, operands)[:2])
    for got, want in zip(jax.tree.leaves(found), expected, strict=True):
        np.testing.assert_array_equal(got, want)
    return 0.0


def check_ranks() -> float:
    """Short and long lists. Of equal numbers the first is better; those after the live ones do not count."""
    for length, live in ((8, 8), (128, 128), (512, 512), (512, 256), (512, 272)):
        bits = np.random.default_rng(length).integers(-1, length // 3, length).astype(np.int32)
        end = -(-live // 128) * 128  # tables of 128
        bits[live:end] = -1
        with interpreted():
            found = launch(
                ranks_kernel, jnp.asarray(bits), out=jax.ShapeDtypeStruct((length,), jnp.int32), grid=(1,),
                live=live, LENGTH=length,
            )  # fmt: skip
        order = np.argsort(-bits[:live], kind="stable")
        assert np.asarray(found)[order].tolist() == list(range(live))
    return 0.0


def main() -> None:
    """Runs every check, or those named, and reports each."""
    checks = {f"case {name}": functools.partial(check_case, name) for name in CASES}
    checks |= {"public": check_public, "not a number": check_not_a_number, "ranks": check_ranks}
    checks["not a number in int8"] = functools.partial(check_not_a_number, "int8")
    wanted = sys.argv[1:] or list(checks)
    for name in wanted:
        start = time.perf_counter()
        error = checks[name]()
        print(f"{name}: ok, {error:.1e}, {time.perf_counter() - start:.1f} s", flush=True)


if __name__ == "__main__":
    main()
