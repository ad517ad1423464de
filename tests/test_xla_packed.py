"""Several sequences in one row give what each gives alone."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
from cases import BY_NAME, PLAIN, Case, Operands
from programs import BRANCHES, by_brute_force, cached, evaluate, random_cotangents

from nsa_jax import attention, layout, reference
from nsa_jax.budget import distance, size
from nsa_jax.config import NSAConfig

SHORT = BY_NAME["shorter_than_every_block_and_window"]
TOGETHER = Case(
    name="together",
    batch=1,
    num_keys=2 + PLAIN.num_keys + 1 + PLAIN.num_keys + SHORT.num_keys + 3,
    runs=(((0, 2), (4, PLAIN.num_keys), (0, 1), (9, PLAIN.num_keys), (1, SHORT.num_keys), (0, 3)),),
)
# For each sequence: the case and row that hold it alone; its first token and compressed key in TOGETHER.
SEQUENCES = (
    (PLAIN, 0, 2, 0),
    (PLAIN, 1, 2 + PLAIN.num_keys + 1, PLAIN.num_compressed),
    (SHORT, 0, 2 + PLAIN.num_keys + 1 + PLAIN.num_keys, 2 * PLAIN.num_compressed),
)


def place(name, together, alone):
    """Copies array `name` of each sequence alone, by token or compressed block, to its place."""
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


def test_very_many_short_sequences_in_one_row():
    """2000 tokens in sequences of 5: far more blocks begin than a row of 2000 tokens has.

    With the gradients of what they are made of, and of the queries.
    """
    config = NSAConfig(compression_block_size=4, compression_stride=2, num_selected_blocks=3, window_size=3)
    count, length, rng = 400, 5, np.random.default_rng(0)
    total, blocks = count * length, layout.num_compression_blocks(count * length, config)
    alone = [  # each sequence is a row, and has one compressed block
        rng.standard_normal((count, n, heads, dim))
        for n, heads, dim in ((length, 2, 3), *[(1, 1, 3), (1, 1, 2)], *[(length, 1, 3), (length, 1, 2)] * 2)
    ]
    alone.append(rng.uniform(size=(count, length, 2, 3)))
    cotangent = rng.standard_normal((count, length, 2, 2))

    def together(x):
        unused = blocks - count if x.shape[1] == 1 else 0
        return np.pad(x.reshape(1, -1, *x.shape[2:]), ((0, 0), (0, unused), (0, 0), (0, 0)))

    def with_gradients(attend, cotangent, *operands):
        out, pull_back = jax.vjp(lambda *first: attend(*first, *operands[3:], config=config), *operands[:3])
        return out, *pull_back(cotangent)

    segment_ids = jnp.arange(total, dtype=jnp.int32)[None] // length + 1
    packed = functools.partial(attention.native_sparse_attention, segment_ids=segment_ids)
    with jax.enable_x64(True):
        found = jax.jit(functools.partial(with_gradients, packed))(*map(together, (cotangent, *alone)))
        each = jax.jit(functools.partial(with_gradients, reference.native_sparse_attention))
        expected = [together(np.asarray(x)) for x in each(cotangent, *alone)]

    for i, (ours, theirs) in enumerate(zip(map(np.asarray, found), expected, strict=True)):
        assert distance(ours, theirs) < 1e-12 * max(1, size(theirs)), i
