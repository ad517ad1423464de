"""Block and slot probabilities of the Triton kernels in the interpreter, against loops; run as a program.

Through `nsa_jax.attention`, so with dispatch; float32, poisoned outputs. Tiles are small, so that a row has
several, and steps of either fewer or more keys than a block.
"""

from triton_interpreter import interpreted  # isort: skip

import contextlib
import dataclasses
import functools
import sys
import time
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import targets_by_loops
from cases import PACKED, Case

from nsa_jax import Run, Runs, attention
from nsa_jax.config import NSAConfig
from nsa_jax.kernels.triton import probabilities, selected
from nsa_jax.kernels.triton.sizes.probabilities import ProbabilitySizes
from nsa_jax.kernels.triton.sizes.selected import SelectedForwardSizes

CONFIG = NSAConfig(compression_block_size=8, compression_stride=4, selection_block_size=16)
BLOCKS_OF_32 = dataclasses.replace(CONFIG, selection_block_size=32)
# Each config has its own sizes, or JAX would run what it traced with others.
TWO_BLOCKS, HALF = ProbabilitySizes(32, 32, 4, 1), ProbabilitySizes(16, 16, 4, 1)


def plain(name: str, **changes) -> Case:
    sizes = dict(batch=1, num_keys=83, num_queries=21, num_heads=6, num_kv_heads=2, key_dim=16, config=CONFIG)
    return Case(name=name, **(sizes | changes))


CASES = {
    "consecutive": (plain("consecutive", num_queries=None, num_keys=37, batch=2), TWO_BLOCKS),
    "last queries": (plain("last queries", key_dim=48), TWO_BLOCKS),
    "half a block": (plain("half a block", config=BLOCKS_OF_32, num_heads=4), HALF),
    "one head": (plain("one head", num_heads=2), TWO_BLOCKS),
    "many blocks": (plain("many blocks", num_keys=1200, positions=(1100, 3, 1199)), TWO_BLOCKS),
    "anywhere": (plain("anywhere", positions=(82, -1, 0, 83, 15, 16, 47, 31, 80)), TWO_BLOCKS),
    "packed": (plain("packed", batch=2, num_keys=75, num_queries=None, runs=PACKED, num_heads=4), TWO_BLOCKS),
    "packed anywhere": (
        plain(
            "packed anywhere", batch=2, num_keys=75, runs=PACKED, config=BLOCKS_OF_32,
            positions=(74, -1, 0, 4, 5, 33, 34, 36, 37, 41, 73, 8, 12),
        ),
        HALF,
    ),
    "scale below 0": (plain("scale below 0", scale=-0.4, num_queries=9), TWO_BLOCKS),
    "scale of 0": (plain("scale of 0", scale=0.0, num_queries=9), TWO_BLOCKS),
}  # fmt: skip
FEW = dict(num_selected_blocks=4)
OF_SLOTS = ("consecutive", "last queries", "half a block", "one head", "anywhere", "packed anywhere")
COMPUTED = ("last queries", "packed anywhere")
# Of probabilities of up to G: products of logits up to about 10, in float32.
TOLERANCE = 16 * 10 * float(np.finfo(np.float32).eps)


def run(case: Case, sizes: ProbabilitySizes, query, key, **more):
    with interpreted(), mock.patch.object(probabilities, "choose_sizes", return_value=sizes):
        ids = None if case.segment_ids is None else jnp.asarray(case.segment_ids)
        where = dict(query_positions=jnp.asarray(case.query_positions)) | more
        where |= dict(segment_ids=ids, scale=case.scale)
        probabilities_of = functools.partial(
            attention.block_probabilities, config=case.config, implementation="triton", **where
        )
        return np.asarray(jax.jit(probabilities_of)(np.float32(query), np.float32(key)))


def rounded(case: Case):
    drawn = case.draw()
    return (np.asarray(np.asarray(x, np.float32), np.float64) for x in (drawn.query, drawn.key_slc))


def close(found, expected) -> float:
    assert found.shape == expected.shape
    error = np.abs(found - expected).max()
    assert error <= TOLERANCE, error
    assert ((found == 0) == (expected == 0)).all()
    return error


def check_case(name: str) -> float:
    """Log-sum-exps computed and given; the sum and the largest."""
    case, sizes = CASES[name]
    query, key = rounded(case)
    lse = case.generator("lse").uniform(2, 4, query.shape[:3]).astype(np.float32)
    worst = 0.0
    for reduce, given in (("sum", None), ("max", lse)):
        expected = targets_by_loops.block_probabilities(case, query, key, reduce, given)
        more = dict(reduce=reduce, lse=None if given is None else jnp.asarray(given))
        worst = max(worst, close(run(case, sizes, query, key, **more), expected))
    return worst


def run_slots(case: Case, query, key, blocks, **more):
    """Steps of half a block in blocks of 32, of a whole one in blocks of 16."""
    sizes = SelectedForwardSizes(16, 16, 4, 1)
    modules = probabilities.slots, selected
    with interpreted(), contextlib.ExitStack() as patches:
        for module in modules:
            patches.enter_context(mock.patch.object(module, "choose_sizes", return_value=sizes))
        ids = None if case.segment_ids is None else jnp.asarray(case.segment_ids)
        where = dict(query_positions=jnp.asarray(case.query_positions), segment_ids=ids, scale=case.scale)
        probabilities_of = functools.partial(
            attention.selected_probabilities, config=case.config, implementation="triton", **where, **more
        )
        return np.asarray(jax.jit(probabilities_of)(np.float32(query), np.float32(key), blocks))


def draw_blocks(case: Case):
    """With unused slots, repetitions, blocks of the future, and a whole tile that selects nothing."""
    shape = (*case.query_positions.shape, case.num_kv_heads, case.config.num_selected_blocks)
    last = case.num_keys // case.config.selection_block_size
    blocks = case.generator("blocks").integers(-1, last + 1, shape, dtype=np.int32)
    blocks[:, 4:9] = -1
    return blocks


def check_slots(name: str) -> float:
    """Log-sum-exps given; in a few cases not: then the forward of the branch gives the probabilities."""
    case = dataclasses.replace(CASES[name][0], config=dataclasses.replace(CASES[name][0].config, **FEW))
    query, key = rounded(case)
    blocks = draw_blocks(case)
    lse = case.generator("lse").uniform(2, 4, query.shape[:3]).astype(np.float32)
    worst = 0.0
    for reduce, given in (("max", lse), ("sum", None))[: 2 if name in COMPUTED else 1]:
        expected = targets_by_loops.selected_probabilities(case, query, key, blocks, reduce, given)
        more = dict(reduce=reduce, lse=None if given is None else jnp.asarray(given))
        worst = max(worst, close(run_slots(case, query, key, blocks, **more), expected))
    return worst


def check_slots_not_a_number() -> float:
    """NaN reaches the slots of those who see it, and no other: by given log-sum-exps, or by the forward."""
    case = dataclasses.replace(CASES["packed"][0], config=dataclasses.replace(CONFIG, **FEW))
    query, key = rounded(case)
    blocks = draw_blocks(case)
    lse = np.full(query.shape[:3], 3.0)
    expected = targets_by_loops.selected_probabilities(case, query, key, blocks, lse=lse)
    query[1, 40, 0, 3] = np.nan  # token 40 of row 1, KV head 0
    key[0, 60, 1, 2] = np.nan  # in block 1 of the sequence that begins at token 41 of row 0
    spoilt = np.zeros(expected.shape, bool)
    spoilt[1, 40, 0] = True
    spoilt[0, 60:74, 1] = blocks[0, 60:74, 1] == 1
    found = run_slots(case, query, key, blocks, lse=jnp.asarray(lse, jnp.float32))
    close(np.where(spoilt, 0, found), np.where(spoilt, 0, expected))
    assert (np.isnan(found) == (spoilt & (expected > 0))).all()

    expected = targets_by_loops.selected_probabilities(case, *rounded(case), blocks)
    spoilt |= spoilt.any(axis=3, keepdims=True)  # the log-sum-exp of such a query is NaN
    found = run_slots(case, query, key, blocks)
    close(np.where(spoilt, 0, found), np.where(spoilt, 0, expected))
    assert (np.isnan(found) == (spoilt & (expected > 0))).all()
    return 0.0


def check_not_a_number() -> float:
    """NaN reaches the blocks of those who see it, whatever the tile, and nothing else."""
    case, sizes = CASES["packed"]
    query, key = rounded(case)
    expected = targets_by_loops.block_probabilities(case, query, key)
    query[1, 40, 0, 3] = np.nan  # token 40 of row 1, KV head 0
    key[0, 60, 1, 2] = np.nan  # seen from token 60 to 73 of row 0, in KV head 1
    key[0, 37, 0, 0] = np.nan  # padding
    spoilt = np.zeros(expected.shape[:3], bool)
    spoilt[1, 40, 0] = spoilt[0, 60:74, 1] = True
    for reduce in ("sum", "max"):
        found = run(case, sizes, query, key, reduce=reduce)
        theirs = targets_by_loops.block_probabilities(case, *rounded(case), reduce)
        close(found[~spoilt], theirs[~spoilt])
        assert (np.isnan(found) == (spoilt[..., None] & (expected > 0))).all()
    return 0.0


def check_runs_joined() -> float:
    """Chunks by `Runs`, whose tiles begin elsewhere, are the whole but for rounding; no future is seen."""
    case, sizes = CASES["consecutive"]
    query, key = rounded(case)
    whole = targets_by_loops.block_probabilities(case, query, key)
    parts = []
    for first, length in ((0, 11), (11, 26)):
        hidden = np.where(np.arange(37)[:, None, None] < first + length, key, np.nan)
        at = Runs((Run(length, first),))
        parts.append(run(case, sizes, query[:, first : first + length], hidden, query_positions=at))
    return close(np.concatenate(parts, axis=1), whole)


def check_vmap() -> float:
    """The mapped axis becomes part of the batch."""
    case, sizes = CASES["consecutive"]
    query, key = (np.float32(x) for x in rounded(case))

    def one(query, key):
        return attention.block_probabilities(
            query[None], key[None], config=case.config, implementation="triton"
        )[0]

    with interpreted(), mock.patch.object(probabilities, "choose_sizes", return_value=sizes):
        found = np.asarray(jax.jit(jax.vmap(one))(query, key))
    return close(found, targets_by_loops.block_probabilities(case, *rounded(case)))


CHECKS = {f"case {name}": lambda name=name: check_case(name) for name in CASES}
CHECKS |= {f"slots {name}": lambda name=name: check_slots(name) for name in OF_SLOTS}
CHECKS |= {"slots, not a number": check_slots_not_a_number}
CHECKS |= {"not a number": check_not_a_number, "runs joined": check_runs_joined, "vmap": check_vmap}

if __name__ == "__main__":
    for name, check in CHECKS.items():
        if len(sys.argv) < 2 or name in sys.argv[1:]:
            begun = time.time()
            print(f"{name}: ok, error {check():.1e}, {time.time() - begun:.1f} s", flush=True)
