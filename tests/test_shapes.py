"""The shapes in the signatures are true: jaxtyping checks every call while all operations are traced."""

import os
import pathlib
import subprocess
import sys

import pytest

ROOT = pathlib.Path(__file__).resolve().parent.parent
PROGRAM = """
import functools, sys
from jaxtyping import install_import_hook
# Not `layout.placement`: JAX rebuilds pytrees with placeholders, which the check of a dataclass refuses.
modules = ["arguments", "attention", "debug", "dispatch", "kernels", "reference"]
modules += ["layout.blocks", "layout.sequences"]
with install_import_hook([f"nsa_jax.{name}" for name in modules], "beartype.beartype"):
    import nsa_jax.attention, nsa_jax.debug, nsa_jax.reference
sys.path.insert(0, "tests")
import jax, jax.numpy as jnp
import index_cases
from cases import BY_NAME
from nsa_jax import attention, reference
from programs import _program, random_cotangents

for name in sys.argv[1:]:
    case = BY_NAME[name]
    index = lambda x: None if x is None else jnp.asarray(x)
    blocks = jnp.zeros((*case.query_positions.shape, case.num_kv_heads, case.config.num_selected_blocks), int)
    for module in ("reference", "xla"):
        jax.eval_shape(
            _program(module, case, None),
            jax.tree.map(jnp.float32, case.draw()),
            blocks,
            index(case.query_positions),
            index(case.segment_ids),
            jax.tree.map(jnp.float32, random_cotangents(case)),
        )
    given = index_cases.draw(case, heads=2, weighted=True)
    for module in (reference, attention):
        where = dict(query_positions=index(case.query_positions), segment_ids=index(case.segment_ids))
        where |= dict(config=case.config)
        jax.eval_shape(
            lambda query, key, weights: (
                jax.grad(lambda x: module.block_scores(x, key, weights=weights, **where).sum())(query),
                module.select_by_index(query, key, weights=weights, **where),
                module.top_blocks(module.block_scores(query, key, **where), **where),
            ),
            *(jnp.float32(x) for x in given),
        )
    print("traced", name)

@jax.eval_shape
def wrong():
    try:
        nsa_jax.layout.sequence_starts(jnp.zeros(3, int))
    except Exception as error:
        print("refused", type(error).__name__)
"""


# One of each kind of program: packed, a step, no compressed keys, other heads and dims.
CASES = (
    "packed_rows_queried_anywhere",
    "one_query_of_many_keys",
    "shorter_than_every_block_and_window",
    "one_head_per_kv_head_odd_dims",
)


def test_annotated_shapes_hold_in_every_case():
    pytest.importorskip("beartype", reason="jaxtyping checks shapes through beartype, of the extra `test`")
    environment = os.environ | {"JAX_PLATFORMS": "cpu", "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, *CASES],
        env=environment,
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )

    assert done.returncode == 0, done.stderr[-4000:]
    *traced, refused = done.stdout.splitlines()
    assert traced == [f"traced {name}" for name in CASES]
    assert refused == "refused TypeCheckError"  # so that the hook was on
