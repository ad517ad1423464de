"""The tables of sizes, and into how many pieces calls of few heads are cut, without a GPU."""

import itertools
import pathlib
import re

import pytest

WHERE = "installed by `tox -e test`; not a dependency of nsa_jax"
pytest.importorskip("jax_triton", reason=f"needs jax-triton, {WHERE}", exc_type=ImportError)

from nsa_jax.kernels.triton.dims import padded_heads, rows_of_tile  # noqa: E402
from nsa_jax.kernels.triton.ranges.backward_key import choose_segments  # noqa: E402
from nsa_jax.kernels.triton.selected.unions import rows_of_listed_tile  # noqa: E402
from nsa_jax.kernels.triton.sizes import (  # noqa: E402
    ALL,
    Row,
    Shape,
    choose_sizes,
    probabilities,
    ranges,
    selected,
    selection,
)
from nsa_jax.kernels.triton.sizes.selected import (  # noqa: E402
    FULL_ITEMS,
    SELECTED_FORWARD,
    SELECTED_QUERY_GRADIENT,
    fitting_item,
    item_queries,
)

ROOT = pathlib.Path(__file__).parent.parent


@pytest.mark.parametrize(
    ("queries", "keys", "kv_heads", "heads", "segments"),
    [
        (65536, 4095, 4, 16, 16),  # as many as fill the GPU
        (8192, 511, 4, 16, 32),  # 256 queries each
        (8192, 511, 8, 4, 16),  # 512 each
        (8192, 511, 8, 1, 16),
        (200, 11, 4, 4, 1),
        (8192, 8192, 8, 4, 1),  # a window: each key is seen by few queries
        (2**20, 65535, 4, 16, 1),  # more would take too much memory
    ],
)
def test_segments_of_queries(queries, keys, kv_heads, heads, segments):
    tile = 128 if heads == 16 else 64

    assert choose_segments(1, queries, keys, kv_heads, heads, 256, tile) == segments


@pytest.mark.parametrize(
    ("heads", "pairs", "item"),
    [
        *((16, 2**22, 2048), (16, 2**19, 1024), (4, 2**21, 2048), (4, 2**21 - 1, 1024), (4, 100, 1024)),
        *((1, 2**23, 8192), (2, 2**22, 4096), (1, 2**19, 1024)),
    ],
)
def test_items_of_the_gradients_of_keys(heads, pairs, item):
    assert item_queries(heads, pairs) == item


def test_an_item_is_halved_until_there_are_enough():
    assert fitting_item(1024, 1024 * FULL_ITEMS, least=512) == 1024
    assert fitting_item(1024, 1024 * FULL_ITEMS - 1, least=512) == 512
    assert fitting_item(1024, 1, least=512) == 512
    assert fitting_item(16, 1, least=512) == 16  # of a test


@pytest.mark.parametrize("table", [SELECTED_FORWARD, SELECTED_QUERY_GRADIENT], ids=["forward", "gradient"])
def test_a_tile_has_no_more_tokens_than_a_list_of_blocks_takes(table):
    heads, dims, blocks = (1, 2, 3, 5, 16, 64, 128), (64, 96, 128, 192, 256), (64, 128)
    for gpu, float_bytes, count, key, value, block in itertools.product(
        ALL, (2, 4), heads, dims, dims, blocks
    ):
        sizes = choose_sizes(table, Shape(gpu, float_bytes, count, key, value, block_size=block))
        tokens = rows_of_listed_tile(sizes.rows, count).tokens
        assert tokens <= 32, (gpu, float_bytes, count, key, value, block)


@pytest.mark.parametrize(
    ("heads", "packed", "listed"),
    [
        *((1, (64, 1), (64, 1)), (3, (21, 3), (21, 3)), (4, (16, 4), (16, 4)), (6, (10, 6), (10, 6))),
        *((7, (9, 7), (8, 8)), (15, (4, 16), (4, 16)), (100, (1, 128), (1, 128))),
    ],
)
def test_heads_that_are_padding_are_left_out_where_more_tokens_fit(heads, packed, listed):
    """Longer tiles have longer lists of blocks, so these ask for a quarter more tokens."""
    rows = max(64, padded_heads(heads))
    assert rows_of_tile(64, heads, packed=True) == (*packed, rows)
    assert rows_of_listed_tile(64, heads) == (*listed, rows)
    assert rows_of_tile(64, heads, packed=False).heads == padded_heads(heads)


def test_what_chose_a_row_can_be_looked_up():
    """A section of the documentation by a part of its heading, or files of results."""
    tables = [x for module in (ranges, selected, selection, probabilities) for x in vars(module).values()]
    marks = {row.by for table in tables if isinstance(table, tuple) for row in table if isinstance(row, Row)}
    assert len(marks) > 10
    for mark in marks - {"compiled", "other dims"}:
        file, _, section = mark.partition(".md, ")
        if section:
            lines = (ROOT / f"{file}.md").read_text().lower().splitlines()
            assert any(line.startswith("#") and section in line for line in lines), mark
        else:
            for name in re.findall(r"h\d+\w+", mark):
                assert (ROOT / "benchmarks" / "results" / f"{name}.jsonl").exists(), mark
