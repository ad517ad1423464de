"""Several sequences in one row give what each gives alone."""

import numpy as np
from budget import distance
from cases import BY_NAME, PLAIN, Case, Operands
from programs import BRANCHES, by_brute_force, cached, evaluate, random_cotangents

SHORT = BY_NAME["shorter_than_every_block_and_window"]
TOGETHER = Case(
    name="together",
    batch=1,
    num_keys=2 + PLAIN.num_keys + 1 + PLAIN.num_keys + SHORT.num_keys + 3,
    runs=(((0, 2), (4, PLAIN.num_keys), (0, 1), (9, PLAIN.num_keys), (1, SHORT.num_keys), (0, 3)),),
)
# Each sequence: the case and row that hold it alone, its first token and its first compressed key together.
SEQUENCES = (
    (PLAIN, 0, 2, 0),
    (PLAIN, 1, 2 + PLAIN.num_keys + 1, PLAIN.num_compressed),
    (SHORT, 0, 2 + PLAIN.num_keys + 1 + PLAIN.num_keys, 2 * PLAIN.num_compressed),
)


def place(name, together, alone):
    """Copies each sequence's part of an array of one token or of one compressed block each to its place."""
    for case, row, token, block in SEQUENCES:
        compressed = name.removeprefix("d_") in ("key_cmp", "value_cmp")
        first, length = (block, case.num_compressed) if compressed else (token, case.num_keys)
        together[0, first : first + length] = alone(case)[name][row]


def together():
    operands, cotangents = TOGETHER.draw()._asdict(), dict(random_cotangents(TOGETHER))
    for name in operands:
        place(name, operands[name], lambda case: case.draw()._asdict())
    for name in cotangents:
        place(name, cotangents[name], random_cotangents)
    blocks = np.full((1, TOGETHER.num_keys, TOGETHER.num_kv_heads, TOGETHER.config.num_selected_blocks), -1)
    place("blocks", blocks, lambda case: by_brute_force(case.name))
    return evaluate(
        "xla", TOGETHER, operands=Operands(**operands), cotangents=cotangents, block_indices=blocks
    )


def test_packed_row_equals_each_sequence_alone_in_values_selections_and_gradients():
    found = together()
    expected = {name: np.zeros_like(x) for name, x in found.items()}
    expected |= {f"lse_{branch}": np.full_like(found[f"lse_{branch}"], -np.inf) for branch in BRANCHES}
    expected["blocks"] -= 1
    for name, x in expected.items():
        place(name, x, lambda case: cached("xla", case.name))

    assert expected.keys() == found.keys()
    for name, x in expected.items():
        assert distance(found[name], x) < 1e-12, name  # padding is 0: it reads nothing and is read by nothing
