"""Rows so short that every query selects all blocks: the selected branch is causal, without lists."""

import re

import jax
import jax.numpy as jnp
import pytest

WHERE = "installed by `tox -e test`; not a dependency of nsa_jax"
pytest.importorskip("jax_triton", reason=f"needs jax-triton, {WHERE}", exc_type=ImportError)

import triton_compile  # noqa: E402

import nsa_jax  # noqa: E402
from nsa_jax.config import NSAConfig  # noqa: E402

CONFIG = NSAConfig()
LONGEST = CONFIG.num_selected_blocks * CONFIG.selection_block_size
LISTS = {
    *("nsa_importance", "nsa_best_blocks", "nsa_union_lists", "nsa_selected_forward", "nsa_count_items"),
    *("nsa_place_counts", "nsa_sorted_pairs", "nsa_item_table"),
}


def kernels(length: int, *, given: bool = False, packed: bool = False) -> set[str]:
    """Names of the kernels that the whole operation launches, with its gradients."""

    def array(*shape, dtype="bfloat16"):
        return jax.ShapeDtypeStruct(shape, dtype)

    def both(query, key_cmp, key, gates, blocks, segments):
        def attend(query, key_cmp, key):
            return nsa_jax.native_sparse_attention(
                query, key_cmp, key_cmp, key, key, key, key, gates, config=CONFIG, segment_ids=segments,
                block_indices=blocks, implementation="triton",
            )  # fmt: skip

        out, pull_back = jax.vjp(attend, query, key_cmp, key)
        return pull_back(out)

    arrays = (
        array(2, length, 32, 128), array(2, (length - 32) // 16 + 1, 2, 128), array(2, length, 2, 128),
        array(2, length, 32, 3), array(2, length, 2, 16, dtype=jnp.int32) if given else None,
        array(2, length, dtype=jnp.int32) if packed else None,
    )  # fmt: skip
    return set(re.findall(r"name=(nsa_\w+)", triton_compile.traced(both, *arrays)))


@pytest.mark.parametrize("packed", [False, True], ids=["plain", "packed"])
def test_rows_that_select_all_need_no_lists(packed):
    found = kernels(LONGEST, packed=packed)

    assert not found & LISTS
    assert {"nsa_selected_causal_forward", "nsa_selected_causal_key_gradients"} <= found


@pytest.mark.parametrize(
    ("length", "given"), [(LONGEST + 1, False), (LONGEST, True)], ids=["longer", "given"]
)
def test_longer_rows_and_blocks_that_are_given_need_them(length, given):
    found = kernels(length, given=given)

    assert "nsa_selected_forward" in found
    assert ("nsa_importance" in found) == (not given)
    assert not any("causal" in name for name in found)
