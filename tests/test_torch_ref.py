"""`nsa_torch_ref.masks` and `.attention` against closed forms and brute-force loops over sets of tokens."""

import dataclasses
import itertools
import subprocess
import sys

import pytest

torch = pytest.importorskip("torch", reason="nsa_torch_ref needs the extra `torch`")

import brute_force  # noqa: E402
import index_cases  # noqa: E402
import numpy as np  # noqa: E402
import targets_by_loops  # noqa: E402
from cases import Case, Operands  # noqa: E402

import nsa_torch_ref as ref  # noqa: E402
from nsa_torch_ref import masks  # noqa: E402

SMALL = ref.NSAConfig(
    compression_block_size=4,
    compression_stride=2,
    selection_block_size=8,
    num_selected_blocks=4,
    window_size=5,
)
NON_OVERLAPPING = ref.NSAConfig(
    compression_block_size=3,
    compression_stride=3,
    selection_block_size=3,
    num_selected_blocks=3,
    window_size=1,
    num_initial_blocks=0,
    num_local_blocks=1,
)
PAPER = ref.NSAConfig()

ROWS = {
    "one_sequence": [1] * 37,
    "padded_right": [1] * 23 + [0] * 14,
    "packed": [0] * 2 + [7] * 9 + [3] * 3 + [0] * 4 + [5] * 17 + [2],
    "shorter_than_a_block": [1] * 3,
    "single_token": [4],
}
CONFIGS = {"small": SMALL, "non_overlapping": NON_OVERLAPPING, "paper": PAPER}


def as_case(row, config):
    runs = tuple((name, len(list(tokens))) for name, tokens in itertools.groupby(row))
    return Case(name="row", config=config, batch=1, num_keys=len(row), runs=(runs,))


def random_inputs(generator, batch, queries, length, config, *, heads=4, kv_heads=2, key_dim=5, value_dim=3):
    blocks = masks.num_compression_blocks(length, config)

    def draw(*shape):
        return torch.randn(shape, generator=generator, dtype=torch.float64)

    query = draw(batch, queries, heads, key_dim)
    pairs = [
        draw(batch, count, kv_heads, width)
        for count in (blocks, length, length)
        for width in (key_dim, value_dim)
    ]
    return [query, *pairs, draw(batch, queries, heads, 3)]


@pytest.fixture
def generator():
    return torch.Generator().manual_seed(0)


@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS)
@pytest.mark.parametrize("row", ROWS.values(), ids=ROWS)
def test_masks_are_the_sets_of_tokens(row, config):
    case = as_case(row, config)
    segment_ids = torch.tensor([row])
    positions = torch.tensor([[*range(len(row)), -1]])
    window = masks.window_mask(segment_ids, positions, config)[0]
    visible = masks.compression_mask(segment_ids, positions, config)[0]
    weights = masks.overlap_weights(segment_ids, config)[0]

    assert visible.shape[1] == case.num_compressed
    for t, position in enumerate(positions[0].tolist()):
        seen = brute_force.sight(case, 0, position)
        assert window[t].nonzero().flatten().tolist() == seen.window
        assert visible[t].nonzero().flatten().tolist() == seen.compressed
    slot = 0
    for tokens in brute_force.sequences(case, 0):
        for c in range(masks.num_compression_blocks(len(tokens), config)):
            blocks = -(-len(tokens) // config.selection_block_size)
            expected = [brute_force.overlap(config, c, block) for block in range(blocks)]
            assert weights[slot].tolist() == expected + [0] * (weights.shape[1] - blocks)
            slot += 1
    assert not weights[slot:].any()


def test_overlap_weights_of_the_paper_are_1_2_2_2_1():
    weights = masks.overlap_weights(torch.ones((1, 320), dtype=torch.long), PAPER)[0].T
    of_block = [column[column > 0].tolist() for column in weights]
    assert of_block == [[2, 2, 2, 1], *(3 * [[1, 2, 2, 2, 1]]), [1, 2, 2, 2]]
    assert weights[1].nonzero().flatten().tolist() == [3, 4, 5, 6, 7]


@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS)
@pytest.mark.parametrize("row", ROWS.values(), ids=ROWS)
def test_whole_operation_is_the_loop_over_tokens(row, config, generator):
    """Importance, selection, each branch with its lse, the gated sum: every query, head and token."""
    inputs = random_inputs(generator, 1, len(row), len(row), config)
    query, key_cmp, value_cmp, key_slc, value_slc, key_win, value_win, _ = inputs
    where = dict(config=config, segment_ids=torch.tensor([row]))
    selected = ref.select_blocks(query, key_cmp, **where)
    found = {
        "importance": ref.importance_scores(query, key_cmp, **where),
        "blocks": selected,
        "out": ref.native_sparse_attention(*inputs, **where),
    }
    for branch, (out, lse) in (
        ("cmp", ref.compressed_attention(query, key_cmp, value_cmp, **where)),
        ("slc", ref.selected_attention(query, key_slc, value_slc, selected, **where)),
        ("win", ref.window_attention(query, key_win, value_win, **where)),
    ):
        found |= {f"out_{branch}": out, f"lse_{branch}": lse}

    expected = brute_force.evaluate(as_case(row, config), Operands(*(x.numpy() for x in inputs)))
    for name, x in found.items():
        np.testing.assert_allclose(x, expected[name], rtol=1e-12, atol=1e-12, err_msg=name)


def test_ties_go_to_the_lower_block():
    """All keys equal: every block but the first (7/8 of a share) and the forced ones ties exactly."""
    config = ref.NSAConfig(num_selected_blocks=6)
    query = torch.randint(-3, 4, (1, 1000, 8, 4)).float()
    key_cmp = torch.ones((1, masks.num_compression_blocks(1000, config), 2, 4))
    selected = ref.select_blocks(query, key_cmp, config=config)
    assert selected[0, 999].tolist() == [[0, 1, 2, 3, 14, 15]] * 2
    assert selected[0, 640].tolist() == [[0, 1, 2, 3, 9, 10]] * 2


@pytest.mark.parametrize(
    ("weighted", "shared"),
    [(False, True), (True, True), (False, False)],
    ids=["largest", "weighted", "own keys"],
)
@pytest.mark.parametrize("row", ["packed", "one_sequence"])
def test_index_scores_are_the_loop_over_tokens(row, weighted, shared, generator):
    """With their gradients, and the selection that follows from them."""
    row = ROWS[row]
    case = as_case(row, SMALL)
    given = index_cases.draw(case, heads=2, dim=3, weighted=weighted, shared=shared)
    leaves = [None if x is None else torch.tensor(x, requires_grad=True) for x in given]
    query, key, weights = leaves
    segment_ids = torch.tensor([row])
    scores = ref.block_scores(query, key, weights=weights, config=SMALL, segment_ids=segment_ids)
    cotangent = torch.randn(scores.shape, generator=generator, dtype=torch.float64)
    inputs = [x for x in leaves if x is not None]
    gradients = torch.autograd.grad(scores, inputs, cotangent)
    positions = torch.arange(len(row))[None]
    blocks = masks.top_blocks(scores.detach(), segment_ids, positions, SMALL)

    expected = index_cases.by_loops(case, given, cotangent.numpy())
    np.testing.assert_allclose(scores.detach(), expected.scores, rtol=1e-12, atol=1e-12)
    np.testing.assert_array_equal(blocks, expected.blocks)
    for found, wanted in zip(gradients, [x for x in expected.gradients if x is not None], strict=True):
        np.testing.assert_allclose(found, wanted, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("row", ["packed", "one_sequence"])
def test_targets_are_the_loop_over_tokens(row, generator):
    row = ROWS[row]
    case = dataclasses.replace(as_case(row, SMALL), key_dim=5)
    query, key_cmp, _, key, *_ = random_inputs(generator, 1, len(row), len(row), SMALL)
    where = dict(config=SMALL, segment_ids=torch.tensor([row]))
    blocks = ref.select_blocks(query, key_cmp, **where)
    blocks = torch.cat((blocks[..., ::2], torch.full_like(blocks[..., ::2], -1)), dim=-1)

    arrays = query.numpy(), key.numpy()
    for found, expected in (
        (ref.block_probabilities(query, key, **where), targets_by_loops.block_probabilities(case, *arrays)),
        (
            ref.selected_probabilities(query, key, blocks, **where),
            targets_by_loops.selected_probabilities(case, *arrays, blocks.numpy()),
        ),
    ):
        np.testing.assert_allclose(found, expected, rtol=1e-12, atol=1e-12)


def test_selection_loss_is_the_loop_over_blocks(generator):
    """The gradient of the scores is the softmax minus the share of the target; the target has none."""
    scores, target = (torch.randn((1, 5, 2, 4), generator=generator, dtype=torch.float64) for _ in range(2))
    target = target.relu()
    scores[0, 0] = -torch.inf  # sees nothing
    scores[0, 1, :, 2] = -torch.inf
    target[0, 2] = 0
    loss = ref.selection_loss(scores.requires_grad_(), target.requires_grad_())
    cotangent = torch.randn(loss.shape, generator=generator, dtype=torch.float64)
    of_scores, of_target = torch.autograd.grad(loss, [scores, target], cotangent, allow_unused=True)

    plain = scores.detach().numpy(), target.detach().numpy()
    np.testing.assert_allclose(loss.detach(), targets_by_loops.selection_loss(*plain), rtol=1e-12, atol=1e-12)
    assert of_target is None
    assert not of_scores[0, [0, 2]].any()
    mass = np.where(np.isinf(plain[0]), 0, plain[1])[:, [1, 3, 4]]
    shares = np.exp(plain[0])[:, [1, 3, 4]], mass
    softmax, share = (x / x.sum(axis=-1, keepdims=True) for x in shares)
    expected = cotangent[:, [1, 3, 4], :, None].numpy() * (softmax - share)
    np.testing.assert_allclose(of_scores[:, [1, 3, 4]], expected, rtol=1e-12, atol=1e-12)


def dense_causal(query, key, value):
    """PyTorch's own causal attention, with the heads repeated by hand."""
    per_head = query.shape[2] // key.shape[2]
    key, value = key.repeat_interleave(per_head, 2), value.repeat_interleave(per_head, 2)
    heads = [x.transpose(1, 2) for x in (query, key, value)]
    return torch.nn.functional.scaled_dot_product_attention(*heads, is_causal=True).transpose(1, 2)


def test_full_coverage_is_dense_causal_attention(generator):
    """The error that the design accepts if n or w covers everything: 1e-5 in float32."""
    query, _, _, key, value, *_ = (x.float() for x in random_inputs(generator, 2, 70, 70, SMALL))
    wide = ref.NSAConfig(**{**vars(SMALL), "num_selected_blocks": 9, "window_size": 70})
    blocks = torch.randn((2, 34, 2, 5), generator=generator)
    selected = ref.select_blocks(query, blocks, config=wide)
    expected = dense_causal(query, key, value)
    for out, _ in (
        ref.selected_attention(query, key, value, selected, config=wide),
        ref.window_attention(query, key, value, config=wide),
    ):
        torch.testing.assert_close(out, expected, atol=1e-5, rtol=0)


def test_packed_row_equals_each_sequence_alone(generator):
    row = ROWS["packed"]
    length, config = len(row), SMALL
    inputs = random_inputs(generator, 1, length, length, config)
    together = ref.native_sparse_attention(*inputs, config=config, segment_ids=torch.tensor([row]))
    first_block = 0
    for tokens in brute_force.sequences(as_case(row, SMALL), 0):
        blocks = slice(first_block, first_block + masks.num_compression_blocks(len(tokens), config))
        first_block = blocks.stop
        part = slice(tokens[0], tokens[-1] + 1)
        cuts = [part, blocks, blocks, part, part, part, part, part]
        alone = [x[:, cut] for x, cut in zip(inputs, cuts, strict=True)]
        alone = ref.native_sparse_attention(*alone, config=config)
        torch.testing.assert_close(together[:, part], alone, atol=1e-12, rtol=1e-12)


@pytest.mark.parametrize("row", ROWS.values(), ids=ROWS)
def test_some_queries_of_a_row_equal_the_rows_of_all(row, generator):
    """T != S, positions out of order, and -1: a query gets what it gets among all, a padding query gets 0."""
    length = len(row)
    inputs = random_inputs(generator, 1, length, length, SMALL)
    segment_ids = torch.tensor([row])
    everything = ref.native_sparse_attention(*inputs, config=SMALL, segment_ids=segment_ids)
    positions = torch.tensor([[length - 1, -1, 0, length // 2]])
    few = [inputs[0][:, positions[0]], *inputs[1:7], inputs[7][:, positions[0]]]
    where = dict(config=SMALL, segment_ids=segment_ids, query_positions=positions)
    out = ref.native_sparse_attention(*few, **where)
    expected = everything[:, positions[0]]
    expected[:, 1] = 0
    torch.testing.assert_close(out, expected, atol=1e-12, rtol=1e-12)
    assert (ref.select_blocks(few[0], few[1], **where)[:, 1] == -1).all()


def test_default_positions_are_the_last_tokens(generator):
    inputs = random_inputs(generator, 2, 37, 37, SMALL)
    everything = ref.native_sparse_attention(*inputs, config=SMALL)
    last = [inputs[0][:, -5:], *inputs[1:7], inputs[7][:, -5:]]
    out = ref.native_sparse_attention(*last, config=SMALL)
    torch.testing.assert_close(out, everything[:, -5:], atol=1e-12, rtol=0)


def test_pinned_selection_replaces_the_choice(generator):
    inputs = random_inputs(generator, 1, 37, 37, SMALL)
    chosen = ref.select_blocks(inputs[0], inputs[1], config=SMALL)
    free = ref.native_sparse_attention(*inputs, config=SMALL)
    assert torch.equal(free, ref.native_sparse_attention(*inputs, config=SMALL, block_indices=chosen))
    nothing = torch.full_like(chosen, -1)
    without = ref.native_sparse_attention(*inputs, config=SMALL, block_indices=nothing)
    gates = inputs[7].clone()
    gates[..., 1] = 0
    shut = ref.native_sparse_attention(*inputs[:7], gates, config=SMALL)
    torch.testing.assert_close(without, shut, atol=1e-12, rtol=0)


@pytest.mark.parametrize("row", ["packed", "shorter_than_a_block"])
def test_gradients_pass_gradcheck(row, generator):
    """f64, selection pinned; the rows hold queries without any key, whose gradients must be finite too."""
    row = ROWS[row]
    few = dict(heads=2, kv_heads=1, key_dim=3, value_dim=2)
    inputs = random_inputs(generator, 1, len(row), len(row), SMALL, **few)
    segment_ids = torch.tensor([row])
    chosen = ref.select_blocks(inputs[0], inputs[1], config=SMALL, segment_ids=segment_ids)
    leaves = [x.requires_grad_() for x in inputs]

    def operation(*args):
        return ref.native_sparse_attention(*args, config=SMALL, segment_ids=segment_ids, block_indices=chosen)

    assert torch.autograd.gradcheck(operation, leaves, eps=1e-6, atol=1e-4, rtol=1e-3, fast_mode=True)


def test_lse_carries_gradients_that_are_finite_on_empty_rows(generator):
    inputs = random_inputs(generator, 1, 12, 12, SMALL, heads=2, kv_heads=1, key_dim=3, value_dim=2)
    leaves = [x.requires_grad_() for x in inputs[:3]]

    def seen_lse(*args):
        out, lse = ref.compressed_attention(*args, config=SMALL)
        return out, torch.where(lse.isfinite(), lse, 0)

    assert torch.autograd.gradcheck(seen_lse, leaves, eps=1e-6, atol=1e-4, rtol=1e-3)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_every_dtype_keeps_its_output_and_a_wide_lse(dtype, generator):
    inputs = [x.to(dtype) for x in random_inputs(generator, 1, 37, 37, SMALL)]
    exact = ref.native_sparse_attention(*(x.double() for x in inputs), config=SMALL)
    chosen = ref.select_blocks(inputs[0].double(), inputs[1].double(), config=SMALL)
    out = ref.native_sparse_attention(*inputs, config=SMALL, block_indices=chosen)
    _, lse = ref.window_attention(inputs[0], inputs[5], inputs[6], config=SMALL)
    assert out.dtype == dtype
    assert lse.dtype == torch.float32
    # Each branch is rounded once to dtype, scaled by its gate, and the sum is rounded again; the SDPA itself
    # may round its probabilities: four roundings of the largest term.
    largest = 3 * max(x.abs().max() for x in (inputs[2], inputs[4], inputs[6])) * inputs[7].abs().max()
    assert (out.double() - exact).abs().max() <= 4 * torch.finfo(dtype).eps * largest


def test_neither_jax_nor_nsa_jax_is_imported():
    probe = "import sys, nsa_torch_ref; print(sorted({'jax', 'nsa_jax', 'flax'} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", probe], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
