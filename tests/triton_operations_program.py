"""Whole operations by the Triton kernels in the interpreter, against the oracle in float64; run as a program.

Through `nsa_jax.attention`, so with dispatch, lists, layouts and custom gradients; float32, poisoned outputs.
"""

from triton_interpreter import interpreted  # isort: skip

import dataclasses
import functools
import sys
import time
from functools import partial
from unittest import mock

import brute_force
import jax
import jax.numpy as jnp
import numpy as np
from cases import Case, Operands
from programs import evaluate, random_cotangents

from benchmarks import one_token
from nsa_jax import attention, reference
from nsa_jax.budget import distance, size
from nsa_jax.config import NSAConfig
from nsa_jax.kernels.triton import selected
from nsa_jax.kernels.triton.sizes.selected import SelectedPartSizes

CONFIG = NSAConfig(
    compression_block_size=8,
    compression_stride=4,
    selection_block_size=16,
    num_selected_blocks=3,
    window_size=16,
    num_initial_blocks=1,
    num_local_blocks=1,
)
RUNS = (((0, 3), (7, 24), (2, 3), (9, 9), (1, 1)), ((3, 5), (4, 1), (8, 2), (1, 27), (0, 5)))
CASES = {
    "consecutive": Case(
        name="triton_consecutive", config=CONFIG, batch=1, num_keys=35, num_heads=4, num_kv_heads=1,
        key_dim=16, value_dim=16,
    ),
    "packed": Case(
        name="triton_packed", config=CONFIG, num_keys=40, num_heads=4, num_kv_heads=2, key_dim=16,
        value_dim=32, runs=RUNS,
    ),
    "anywhere": Case(
        name="triton_anywhere", config=CONFIG, num_keys=40, num_heads=3, num_kv_heads=1, key_dim=48,
        value_dim=16, positions=(39, -1, 0, 26, 7, 8, 31, 38), scale=0.3, runs=RUNS,
    ),
    "many keys": Case(  # more than a program searches at once
        name="triton_many_keys", config=CONFIG, batch=1, num_keys=150, num_queries=14, num_heads=4,
        num_kv_heads=2, key_dim=48, value_dim=16,
    ),
}  # fmt: skip
ONE_PACKED_ROW = dataclasses.replace(CASES["packed"], batch=1, runs=RUNS[:1])
# Of the largest value, beside the exact result: the budget of `parity`, without what it allows on top.
TOLERANCE = 8 * float(np.finfo(np.float32).eps)


def check_not_finite(name: str) -> float:
    """NaN and infinity reach the results that depend on them, and no others: the pattern of the oracle.

    All results and gradients, under random cotangents of every output and log-sum-exp.
    """
    case = CASES[name]
    operands = jax.tree.map(np.copy, case.draw())
    cotangents = {x: np.copy(cotangent) for x, cotangent in random_cotangents(case).items()}
    blocks = brute_force.evaluate(case, operands)["blocks"]
    queries = operands.query.shape[1]
    operands.query[-1, queries // 2, 0, 3] = np.nan
    operands.key_slc[0, -19, 0, 1] = np.nan
    operands.value_slc[0, -9, -1, 2] = np.inf
    operands.value_win[0, -22, 0, 0] = np.nan
    operands.key_win[-1, -7, -1, 2] = np.nan
    operands.value_cmp[0, -2, 0, 5] = np.nan
    cotangents["out_cmp"][-1, 5, 0, 1] = np.inf
    cotangents["out_win"][0, queries - 2, -1, 3] = np.nan
    cotangents["out_slc"][0, 0, 0, 0] = np.nan  # padding in packed rows
    cotangents["lse_slc"][0, queries // 3, 0] = np.nan
    given = dict(operands=operands, cotangents=cotangents, block_indices=blocks)
    expected = evaluate("reference", case, **given)
    with interpreted():
        found = evaluate("triton", case, "float32", **given)
    chosen = found["blocks"] == blocks
    chosen[-1, queries // 2, 0] = True  # by what is not a number
    assert chosen.all(), name
    worst = 0.0
    for result in (*random_cotangents(case), *(f"d_{operand}" for operand in Operands._fields)):
        finite = np.isfinite(expected[result])
        wrong = np.argwhere(np.isfinite(found[result]) != finite)
        wrong = [at for at in wrong if expected[result][tuple(at)] != -np.inf != found[result][tuple(at)]]
        assert not wrong, (name, result, wrong[:5], len(wrong), wrong[0].size)
        ours, theirs = (np.where(finite, x[result], 0) for x in (found, expected))
        error = distance(ours, theirs) / max(1.0, size(theirs))
        assert error <= TOLERANCE, (name, result, error)
        worst = max(worst, error)
    return worst


def check_a_key_that_is_not_a_number() -> float:
    """Each branch alone has the oracle's pattern: in the sum, one branch's NaN hides what another lacks."""
    case = CASES["consecutive"]
    operands = jax.tree.map(np.float32, case.draw())
    own = np.arange(case.num_keys, dtype=np.int32)[None, :, None, None] // CONFIG.selection_block_size
    blocks = np.concatenate([own, np.where(own > 0, 0, -1), np.full_like(own, -1)], axis=-1)
    operands.key_cmp[0, 4, 0, 1] = operands.key_win[0, 21, 0, 1] = operands.key_slc[0, 21, 0, 1] = np.nan
    branches = {
        "compressed_attention": (operands.key_cmp, operands.value_cmp, ()),
        "window_attention": (operands.key_win, operands.value_win, ()),
        "selected_attention": (operands.key_slc, operands.value_slc, (blocks,)),
    }

    def with_gradients(module, **settings):
        @jax.jit
        def run(query, branches):
            found = {}
            for name, (key, value, more) in branches.items():
                attend = partial(getattr(module, name), config=CONFIG, **settings)
                (out, _), pull_back = jax.vjp(
                    lambda *x, attend=attend, more=more: tuple(attend(*x, *more)[:2]), query, key, value
                )
                found[name] = out, *pull_back((jnp.ones_like(out), jnp.zeros(out.shape[:-1])))
            return found

        return run(operands.query, branches)

    expected = with_gradients(reference)
    with interpreted():
        found = with_gradients(attention, implementation="triton")
    for name, results in expected.items():
        for ours, theirs in zip(found[name], results, strict=True):
            finite = np.isfinite(theirs)
            assert not finite.all(), name
            assert np.array_equal(np.isfinite(ours), finite), name
    return 0.0


def check_whole(case: Case, slots: int) -> float:
    """`vmap` of `native_sparse_attention`, its own selection included, equals that of `xla`.

    First without and then with gradients, which are different kernels. The rows have three blocks: with as
    many slots, the selected branch is causal.
    """
    config, where = dataclasses.replace(CONFIG, num_selected_blocks=slots), dict(segment_ids=case.segment_ids)
    operands = jax.tree.map(np.float32, case.draw())
    cotangent = np.float32(random_cotangents(case)["out"])

    def with_gradients(implementation):
        more = dict(config=config, implementation=implementation, **where)

        def attend(*operands):
            return attention.native_sparse_attention(*operands, **more)

        def with_probabilities(*operands):
            blocks = attention.select_blocks(*operands[:2], **more)
            return attention.native_sparse_attention(
                *operands, block_indices=blocks, return_probabilities=True, **more
            )

        def run(cotangent, *operands):
            out, pull_back = jax.vjp(attend, *operands)
            gradients, both = pull_back(cotangent), with_probabilities(*operands)
            if implementation == "xla":
                return out, out, *gradients, *both, both[1]
            probabilities = jax.vjp(with_probabilities, *operands)[0][1]  # of the forward that gradients have
            return attend(*operands), out, *gradients, *both, probabilities

        return run

    expected = jax.jit(with_gradients("xla"))(cotangent, *operands)
    with interpreted():
        twice = jax.jit(jax.vmap(with_gradients("triton")))(
            *(np.stack([x, x]) for x in (cotangent, *operands))
        )
    worst = 0.0
    for (ours, second), theirs in zip(twice, expected, strict=True):
        assert np.array_equal(second, ours)
        error = distance(np.asarray(ours), np.asarray(theirs)) / max(1.0, size(np.asarray(theirs)))
        assert error <= 2 * TOLERANCE, error  # neither is exact
        worst = max(worst, error)
    return worst


def with_gradients(attend, cotangent, operands: Operands) -> tuple:
    """What `attend` gives without and with gradients, and these."""
    out, pull_back = jax.vjp(lambda operands: attend(*operands), operands)
    return attend(*operands), out, *pull_back(cotangent)[0]


@functools.cache
def oracle_of_whole(name: str):
    """The three branches by the oracle, with the blocks given."""
    more = dict(config=CONFIG, segment_ids=CASES[name].segment_ids)

    def run(cotangent, operands, blocks):
        attend = partial(reference.native_sparse_attention, block_indices=blocks, **more)
        return with_gradients(attend, cotangent, operands)

    return jax.jit(run)


def check_whole_not_finite(name: str, way: str = "tiles") -> float:
    """The three branches at once: NaN and infinity in each of them and in the gates.

    Against the oracle: without gradients the sum is repaired, with them what the backward reads. With "parts"
    as the way, key blocks are outside; with "causal" the blocks are all, and not given to the kernels.
    """
    case = CASES[name]
    drawn = jax.tree.map(np.float32, case.draw())
    blocks = np.int32(brute_force.evaluate(case, case.draw())["blocks"])
    cotangent = np.float32(random_cotangents(case)["out"])
    queries, last = drawn.query.shape[1], -1
    nan, inf, later = np.nan, np.inf, queries - 2
    runs = (
        {"value_cmp": ((0, last, 0, 5), nan), "key_win": ((last, 33, last, 2), nan)},
        {"value_slc": ((0, -9, last, 2), inf), "query": ((last, queries // 3, 0, 3), nan)},
        {"gates": ((0, 11, 0, 1), nan), "d_out": ((0, later, last, 3), inf)},
    )
    if name != "consecutive" or way != "tiles":
        runs = ({"key_slc": ((0, 5, last, 1), nan), "value_win": ((0, -9, 0, 0), inf)},)
    parts = SelectedPartSizes(16, 4, 1, None, 1024, fewest_keys=0, most_shared=4)
    settings = dict(
        BLOCK=16, FEWEST_PAIRS=0, FEWEST_ASKED_FORWARD=0,
        find_sizes=lambda table, shape: parts if way == "parts" else None,
    )  # fmt: skip

    @jax.jit
    def by_kernels(cotangent, operands):
        more = dict(segment_ids=case.segment_ids, block_indices=None if way == "causal" else blocks)
        attend = partial(attention.native_sparse_attention, config=CONFIG, implementation="triton", **more)
        return with_gradients(attend, cotangent, operands)

    worst = 0.0
    for wrong in runs:
        arrays = {k: np.copy(x) for k, x in (drawn._asdict() | {"d_out": cotangent}).items()}
        for array, (at, x) in wrong.items():
            arrays[array][at] = x
        d_out, operands = arrays.pop("d_out"), Operands(**arrays)
        expected = oracle_of_whole(name)(d_out, operands, blocks)
        with interpreted(), mock.patch.multiple(selected, **settings):
            found = by_kernels(d_out, operands)
        names = ("alone", "out", *Operands._fields)
        assert not all(np.isfinite(x).all() for x in expected)
        for result, ours, theirs in zip(names, found, expected, strict=True):
            finite = np.isfinite(theirs)
            assert np.array_equal(np.isfinite(ours), finite), (name, wrong, result)
            ours, theirs = (np.where(finite, x, 0) for x in (ours, theirs))
            error = distance(ours, theirs) / max(1.0, size(theirs))
            assert error <= 2 * TOLERANCE, (name, wrong, result, error)  # neither is exact
            worst = max(worst, error)
    return worst


def check_one_token() -> float:
    """The kernels that the benchmark sets beside ours, with their gradients.

    Once a block has several items, once one; some tokens select nothing, and nobody selects block 1.
    """

    def with_gradients(attend, operands, blocks, cotangents):
        def run(query, key, value):
            return tuple(attend(query, key, value, blocks, config=CONFIG))

        results, pull_back = jax.vjp(run, *operands)
        return *results, *pull_back(cotangents)

    worst = 0.0
    for name, item in (("consecutive", 4), ("many keys", 1024)):
        case = CASES[name]
        drawn = jax.tree.map(np.float32, case.draw())
        operands = drawn.query, drawn.key_slc, drawn.value_slc
        blocks = np.int32(brute_force.evaluate(case, case.draw())["blocks"])
        blocks[blocks == 1] = blocks[:, ::7] = -1
        drawn = random_cotangents(case)
        cotangents = tuple(np.float32(drawn[x]) for x in ("out_slc", "lse_slc"))
        given = operands, blocks, cotangents
        expected = jax.jit(partial(with_gradients, reference.selected_attention))(*given)
        ours = partial(one_token.selected_attention, settings=one_token.Settings(item=item))
        with interpreted():
            found = jax.jit(partial(with_gradients, ours))(*given)
        for result, one, other in zip(("out", "lse", "query", "key", "value"), found, expected, strict=True):
            one, other = np.asarray(one), np.asarray(other)
            error = distance(one, other) / max(1.0, size(np.where(np.isfinite(other), other, 0)))
            assert error <= 2 * TOLERANCE, (name, result, error)  # neither is exact
            worst = max(worst, error)
    return worst


CHECKS = {  # most of them only with some numbers that are not finite, by the same kernels
    "not finite, many keys": lambda: check_not_finite("many keys"),
    "not finite, anywhere": lambda: check_not_finite("anywhere"),
    "whole, not finite": lambda: check_whole_not_finite("consecutive"),
    "whole, not finite, packed": lambda: check_whole_not_finite("packed"),
    "whole, not finite, parts": lambda: check_whole_not_finite("consecutive", "parts"),
    "whole, not finite, short rows": lambda: check_whole_not_finite("consecutive", "causal"),
    "a key that is not a number": check_a_key_that_is_not_a_number,
    "whole": lambda: check_whole(CASES["consecutive"], 2),
    "whole, short rows": lambda: check_whole(CASES["consecutive"], 3),
    "whole, short packed rows": lambda: check_whole(ONE_PACKED_ROW, 3),
    "one token": check_one_token,
}


def main(names: list[str]) -> None:
    for name in names or CHECKS:
        began = time.perf_counter()
        worst = CHECKS[name]()
        print(f"{name}: ok in {time.perf_counter() - began:.1f} s, worst error {worst:.1e}", flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
