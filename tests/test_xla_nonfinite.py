"""NaN and infinity stay where they belong: finite where the oracle is finite, and with the same numbers.

Each program is compiled once, since only the numbers differ. Two things differ from the oracle:

* A value that is not finite spoils everything of the queries that see it, as a key would: their whole output,
  log-sum-exp and gradients. In the oracle it spoils one column of the output.
* The gradient of a query stays finite if it sees an infinite key with weight 0. In the oracle, 0 times
  infinity is NaN.
"""

import dataclasses
import functools

import brute_force
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases import BY_NAME, OVERLAPPING, PACKED_ROWS, Operands
from programs import BRANCHES, MODULES, OPTIONS, cached, evaluate, random_cotangents
from test_properties import TILES

from nsa_jax.budget import size

GRADIENTS = tuple(f"d_{name}" for name in Operands._fields)
RESULTS = ("out", *(f"{kind}_{branch}" for kind in ("out", "lse") for branch in BRANCHES), *GRADIENTS)
COMPRESSED = ("key_cmp", "value_cmp")


def fill(operands, number, where):
    """Fills the places `where(name)` of each operand `[B, tokens, heads, dim]`; None fills no place."""
    for name in Operands._fields:
        if (places := where(name)) is not None:
            getattr(operands, name)[places] = number


def one_number(name):
    return lambda operands, case, number: fill(operands, number, {name: np.s_[-1, 7, 0, -1]}.get)


def one_row(operands, case, number):
    fill(operands, number, lambda name: np.s_[0])


def one_kv_head(operands, case, number):
    heads = case.num_heads // case.num_kv_heads
    fill(operands, number, lambda name: np.s_[:, :, : heads if name in ("query", "gates") else 1])


def future(operands, case, number):
    """All tokens from 57 on, and the compressed blocks that end there."""
    blocks = (57 - case.config.compression_block_size) // case.config.compression_stride + 1
    queries = 57 - case.query_positions[0, 0]
    first = dict.fromkeys(COMPRESSED, blocks) | dict(query=queries, gates=queries)
    fill(operands, number, lambda name: np.s_[:, first.get(name, 57) :])


def padding(operands, case, number):
    fill(operands, number, lambda name: None if name in COMPRESSED else case.segment_ids == 0)


def sequence(operands, case, number):
    """The longest sequence of each row, and its compressed blocks, which come after those of shorter ones."""
    longest = np.array([[9], [1]])
    blocks = np.zeros(operands.key_cmp.shape[:2], bool)
    blocks[0, 13 : 13 + 15] = blocks[1, 1 : 1 + 24] = True
    fill(operands, number, lambda name: blocks if name in COMPRESSED else case.segment_ids == longest)


PLACES = {name: one_number(name) for name in Operands._fields} | dict(row=one_row, kv_head=one_kv_head)
SITES = {  # lists of blocks; few rows, as in a decode step; a mask; packed rows
    "plain": (*PLACES, "future"),
    "last_queries_of_the_row": (*PLACES, "future"),
    "one_query_of_many_keys": ("key_cmp", "value_cmp", "key_slc", "value_slc", "kv_head"),
    "everything_covered": (*PLACES, "future"),
    "packed_rows": (*PLACES, "padding", "sequence"),
}
PLACES |= dict(future=future, padding=padding, sequence=sequence)
every_site = pytest.mark.parametrize(
    ("name", "place"), [(name, place) for name, places in SITES.items() for place in places]
)
every_number = pytest.mark.parametrize("number", [np.nan, np.inf], ids=str)


def spoilt(case, place, number):
    operands = jax.tree.map(np.array, case.draw())
    PLACES[place](operands, case, number)
    return operands


@functools.cache
def results(module, name, place, number, sizes=None):
    return evaluate(module, BY_NAME[name], operands=spoilt(BY_NAME[name], place, number), sizes=sizes)


def differences(found, expected, most, infinite_key):
    """Results that are not finite but should be, that are finite but should not be, or that differ."""
    wrong = {}
    for name in expected.keys() & found.keys() & {*RESULTS}:
        ours, theirs = found[name], expected[name]
        finite = np.isfinite(ours)
        too_many = ~finite & np.isfinite(most[name])
        too_few = finite & ~np.isfinite(theirs) & (not (infinite_key and name == "d_query"))
        both = finite & np.isfinite(theirs)
        apart = np.abs(np.where(both, ours, 0) - np.where(both, theirs, 0)).max()
        if too_many.any() or too_few.any() or apart > 1e-12 * max(1, size(theirs)):
            wrong[name] = (too_many.sum(), too_few.sum(), apart)
    return wrong


def of_token(place):
    """For a place of values, the same place of the keys; any other place as it is."""
    return place.replace("value", "key")


@every_site
@every_number
def test_results_are_finite_where_those_of_the_reference_are(name, place, number):
    found, expected = (results(module, name, place, number) for module in ("xla", "reference"))
    most = results("reference", name, of_token(place), np.nan) if "value" in place else expected

    assert differences(found, expected, most, number == np.inf and place.startswith("key")) == {}


@every_site
def test_results_that_stay_finite_are_those_without_the_nan(name, place):
    found, clean = results("xla", name, place, np.nan), cached("xla", name)

    nan = {result: np.where(np.isnan(found[result]), np.nan, clean[result]) for result in RESULTS}
    assert differences(found, nan, nan, False) == {}
    chosen = ~np.isnan(found["lse_cmp"]).reshape(*found["blocks"].shape[:3], -1).any(-1)
    assert (found["blocks"] == clean["blocks"])[chosen].all()


@pytest.mark.parametrize("place", ["query", "key_slc", "value_slc", "key_win", "padding", "sequence"])
def test_tiles_hand_on_no_nan(place):
    """Some tiles hold the end of one sequence and the beginning of the next."""
    found = results("xla", "packed_rows", place, np.nan, TILES["drawn"])
    expected = results("xla", "packed_rows", place, np.nan)

    assert differences(found, expected, expected, False) == {}


# With 7 selected blocks the whole operation attends to all branches at once; otherwise branch by branch.
WHOLE = {
    "at_once": dataclasses.replace(
        PACKED_ROWS, config=dataclasses.replace(OVERLAPPING, num_selected_blocks=7)
    ),
    "by_branch": PACKED_ROWS,
}


@functools.cache
def whole_program(module, row):
    case = WHOLE[row]

    def run(operands, blocks, cotangent):
        attend = functools.partial(
            MODULES[module].native_sparse_attention, config=case.config, segment_ids=case.segment_ids,
            block_indices=blocks,
        )  # fmt: skip
        out, pull_back = jax.vjp(attend, *operands)
        return dict(zip(("out", *GRADIENTS), (out, *pull_back(cotangent)), strict=True))

    return jax.jit(run, compiler_options=OPTIONS[module])


@functools.cache
def whole_blocks(row):
    return brute_force.evaluate(WHOLE[row], WHOLE[row].draw())["blocks"].astype(np.int32)


def whole(module, row, operands, cotangent=None):
    cotangent = random_cotangents(WHOLE[row])["out"] if cotangent is None else cotangent
    with jax.enable_x64(True):
        found = whole_program(module, row)(operands, jnp.asarray(whole_blocks(row)), cotangent)
        return {name: np.asarray(x) for name, x in found.items()}


@pytest.mark.parametrize("row", WHOLE)
@pytest.mark.parametrize("place", SITES["packed_rows"])
@every_number
def test_whole_operation_is_finite_where_the_reference_is(row, place, number):
    operands = spoilt(WHOLE[row], place, number)
    found, expected = (whole(module, row, operands) for module in ("xla", "reference"))
    most = (
        whole("reference", row, spoilt(WHOLE[row], of_token(place), np.nan)) if "value" in place else expected
    )

    assert differences(found, expected, most, number == np.inf and place.startswith("key")) == {}


@pytest.mark.parametrize("name", ["plain", "packed_rows"])
@every_number
def test_cotangents_of_rows_that_see_nothing_reach_no_key_and_no_value(name, number):
    cotangents, clean = dict(random_cotangents(BY_NAME[name])), cached("xla", name)
    for branch in BRANCHES:
        blind = clean[f"lse_{branch}"] == -np.inf
        assert blind.any() or name == "plain"
        for kind in ("out", "lse"):
            x = cotangents[f"{kind}_{branch}"].copy()
            x[blind] = number
            cotangents[f"{kind}_{branch}"] = x
    found = evaluate("xla", BY_NAME[name], cotangents=cotangents)

    for gradient in GRADIENTS[1:-1]:
        assert np.abs(found[gradient] - clean[gradient]).max() <= 1e-12 * size(clean[gradient]), gradient


@pytest.mark.parametrize("row", WHOLE)
@every_number
def test_cotangents_of_padding_reach_no_key_and_no_value_of_the_whole(row, number):
    operands, cotangent = WHOLE[row].draw(), random_cotangents(WHOLE[row])["out"].copy()
    clean = whole("xla", row, operands)
    cotangent[WHOLE[row].segment_ids == 0] = number
    found = whole("xla", row, operands, cotangent)

    for gradient in GRADIENTS[1:-1]:
        assert np.abs(found[gradient] - clean[gradient]).max() <= 1e-12 * size(clean[gradient]), gradient
