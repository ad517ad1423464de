"""The lists of producers and consumers in Triton's interpreter: `python tests/mosaic_lists_program.py`."""

from triton_interpreter import interpreted  # isort: skip

import jax
import numpy as np
import triton_block_program as program
from mosaic_lists import visit_lists_by_loops

from nsa_jax.kernels.mosaic_gpu.visits import visit_lists
from nsa_jax.kernels.triton.selected.unions import union_lists


def check_visit_lists(case: program.Case) -> None:
    """The lists of producer and consumers are those that loops find."""
    (_, _, _, indices), placed, *_ = program.inputs(case)
    rows = np.where(placed.position >= 0, placed.sequence_start + placed.position, -1)
    sizes = [dict(tokens=tokens, warpgroups=2, longest_gap=gap) for tokens, gap in ((8, 2), (16, 5))]

    @jax.jit
    def visits_of_all():
        every = [union_lists(indices, placed, case.num_keys, tokens=shared["tokens"]) for shared in sizes]
        return [visit_lists(lists, **shared) for lists, shared in zip(every, sizes, strict=True)]

    with interpreted():
        every = visits_of_all()
    for shared, found in zip(sizes, every, strict=True):
        expected = visit_lists_by_loops(
            np.asarray(indices), np.asarray(placed.sequence_start), rows,
            block=case.block, keys=case.block, **shared,
        )  # fmt: skip
        assert (np.asarray(found.counts) == expected.counts).all()
        for at in np.ndindex(*expected.counts.shape[:3]):
            fills, *visits = expected.counts[at][[0, 1, 3]]
            assert (np.asarray(found.fills)[at][:fills] == expected.fills[at][:fills]).all()
            for w, count in enumerate(visits):
                assert (np.asarray(found.visits)[at][w, :count] == expected.visits[at][w, :count]).all()


if __name__ == "__main__":
    for name, case in program.CASES.items():
        check_visit_lists(case)
        print(f"{name}: ok", flush=True)
