"""The bodies of the Triton kernels in Triton's interpreter, on the CPU, in float32, against the oracles.

The programs run in a process of their own, because the interpreter is chosen when Triton is imported. They
share it, since starting one takes two seconds.
"""

import os
import pathlib
import subprocess
import sys

import pytest

WHERE = "installed by `tox -e test`; not a dependency of nsa_jax"
pytest.importorskip("jax_triton", reason=f"needs jax-triton, {WHERE}", exc_type=ImportError)

# Every check that a program must report; a dropped one fails.
CHECKS = {
    "decode": (
        *("case one token", "case short rows", "case a full row", "case equal keys", "case four tokens"),
        *("case no room for all", "case eight tokens", "case one head", "case shared", "case a function"),
        *("case rotated means", "case MLPs, many blocks", "case an MLP of values"),
        *("case odd blocks", "case odd blocks, equal keys", "case one key a block"),
        *("case groups of rows", "case many lists", "case few parts", "case three heads of two"),
        *("case given blocks", "case given blocks of four tokens", "case the selected branch alone"),
        *("case no compressed branch", "case no compressed branch, shared", "case no window"),
        *("case int8", "case int8, shared, two pieces a dim", "not a number in int8"),
        *("public", "not a number", "ranks"),
    ),
    "range": (
        *(f"case {x}" for x in ("window", "compressed", "packed", "scattered", "all", "known_window")),
        *(
            "case apart",
            "case known_odd",
            "case known_long",
            "case known_peeled",
            "case known_many",
            "case known_short",
            "case known_end",
            "case known_later",
            "case known_strides",
            "case known_halves",
            "case known_causal",
            "case known_halves_many",
            "case runs_window",
            "case runs_one",
            "case runs_three_heads",
            "case runs_of_odd_length",
            "case runs_ring",
            "case runs_stretches",
            "case runs_strides",
            "case runs_strides_part",
            "case nothing",
            "case zero_scale",
            "hidden keys",
            "bounds",
            "edges",
        ),
    ),
    "block": (
        *("one_head", "two_heads_split_blocks", "six_heads_seven_slots", "sixteen_heads"),
        *(
            "block_of_two_steps",
            "packed",
            "repeated",
            "empty_tiles",
            "packed_anywhere",
            "anywhere",
        ),
        *("more_slots_than_blocks", "nothing", "one_query", "fewer_keys_than_a_block", "named twice"),
        *("nothing to do", "not a number"),
    ),
    "sort": (
        *("case one tile", "case many tiles", "case more tiles than are added up at a time"),
        *("case odd slots", "case one slot", "case ranges", "case ranges of less than a tile"),
        *("case more places than are added up at a time", "case more slots than a tile has pairs"),
        *("case as in rows of 8k", "case no pair", "case every pair", "case one place", "case one query"),
        *("case a single pair", "tiles"),
    ),
    "selection": (
        *("check_random_scores", "check_odd_configs_of_the_suite", "check_heads_and_dims"),
        *("check_chunks_and_tiles", "check_paper_config", "check_packed_rows", "check_few_tokens"),
        *("check_ties", "check_ties_of_sums", "check_scores_of_zero_are_chosen"),
        *("check_not_a_number_is_harmless", "check_rows_without_a_normaliser"),
    ),
    "index": (
        *("check_heads_and_weights", "check_chunks_and_tiles", "check_odd_blocks", "check_negative_scale"),
        *("check_packed_rows", "check_few_queries", "check_what_is_not_finite_stays"),
        *("check_scores_that_are_given", "check_scores_that_are_taught", "check_public"),
        "check_keys_of_each_kv_head",
        "check_scores_that_are_not_finite_have_no_gradient",
        "check_scores_of_chosen_blocks",
        "check_float16_adds_up_what_is_too_small_for_it",
        "check_quantised_keys",
    ),
    "probabilities": (
        *("case consecutive", "case last queries", "case half a block", "case one head", "case many blocks"),
        *("case anywhere", "case packed", "case packed anywhere", "case scale below 0", "case scale of 0"),
        *("slots consecutive", "slots last queries", "slots half a block", "slots one head"),
        *("slots anywhere", "slots packed anywhere", "slots, not a number"),
        *("not a number", "runs joined", "vmap"),
    ),
    "dense_decode": (
        *("case one token", "case short rows", "case a full row", "case no room for all"),
        *("case some of four tokens", "case eight tokens, two pieces a dim", "case groups of rows"),
        *("case a ring", "case a ring, some of eight tokens", "case a window shorter than the step"),
        *("case an array shorter than the window", "public", "not a number"),
        *("case int8", "case int8, a ring"),
    ),
    "operations": (
        "one token",
        *("whole", "whole, short rows", "whole, short packed rows"),
        *("not finite, many keys", "not finite, anywhere", "a key that is not a number"),
        *("whole, not finite", "whole, not finite, packed"),
        *("whole, not finite, parts", "whole, not finite, short rows"),
    ),
}


RUN = """
import runpy, sys
import jax
for program in sys.argv[1:]:
    sys.argv = [program]
    jax.clear_caches()  # a program gives the same functions other sizes
    runpy.run_path(program, run_name="__main__")
"""


@pytest.mark.slow
def test_kernels_equal_the_oracle():
    tests = pathlib.Path(__file__).parent
    programs = [str(tests / f"triton_{topic}_program.py") for topic in CHECKS]
    environment = os.environ | {
        "JAX_PLATFORMS": "cpu",
        "PYTHONPATH": os.pathsep.join([str(tests.parent), str(tests)]),
    }
    done = subprocess.run(
        [sys.executable, "-c", RUN, *programs], env=environment, cwd=tests.parent, capture_output=True,
        text=True, check=False,
    )  # fmt: skip

    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    passed = [line.split(": ok")[0] for line in done.stdout.splitlines() if ": ok" in line]
    assert sorted(passed) == sorted(check for checks in CHECKS.values() for check in checks)
