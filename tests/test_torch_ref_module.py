"""`nsa_torch_ref.module`: phi, gates and rotary against loops; packed rows, shifts, step-by-step decode."""

import dataclasses
import math

import pytest
from messages import refused

torch = pytest.importorskip("torch", reason="nsa_torch_ref needs the extra `torch`")

import nsa_torch_ref as ref  # noqa: E402
from nsa_torch_ref import masks  # noqa: E402
from nsa_torch_ref.module import block_tokens  # noqa: E402
from nsa_torch_ref.rotary import rotate  # noqa: E402

CONFIG = ref.NSAConfig(
    compression_block_size=4,
    compression_stride=2,
    selection_block_size=8,
    num_selected_blocks=3,
    window_size=5,
)
ONE_LOCAL = dataclasses.replace(CONFIG, num_local_blocks=1)  # so that there is a choice
TWO_FREE = dataclasses.replace(ONE_LOCAL, selection_block_size=4, num_selected_blocks=4)


def randomised(module, seed=0):
    """Draws every parameter at random, also those that start at zero; float64."""
    generator = torch.Generator().manual_seed(seed)
    module = module.double()
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.copy_(0.3 * torch.randn(parameter.shape, generator=generator, dtype=torch.float64))
    return module


def layer(**changes):
    sizes = dict(num_kv_heads=2, head_dim=5, value_dim=3, config=CONFIG)
    return randomised(ref.NSAAttention(4, 12, **sizes | changes))


def tokens(*shape, seed=1):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def test_unknown_compression_is_an_error():
    with refused(ValueError, r"compression must be .*, got 'max'"):
        ref.Compressor(4, CONFIG, mode="max")


def test_mlp_compressor_starts_as_the_mean():
    x = block_tokens(tokens(2, 11, 2, 5), torch.ones((2, 11), dtype=torch.long), CONFIG)
    mlp, mean = (ref.Compressor(5, CONFIG, mode=mode).double()(x) for mode in ("mlp", "mean"))
    assert torch.equal(mlp, mean)
    assert mean.shape == (2, 4, 2, 5)


def test_compressor_is_the_loop_over_blocks():
    phi = randomised(ref.Compressor(5, CONFIG, hidden_dim=7)).requires_grad_(False)
    row = [0, 6, 6, 6, 6, 6, 6, 9, 9, 9, 4, 4, 4, 4]
    x = tokens(1, len(row), 2, 5)
    out = phi(block_tokens(x, torch.tensor([row]), CONFIG))
    assert out.shape == (1, 6, 2, 5)
    for slot, first in enumerate([1, 3, 10]):
        for head in range(2):
            block = x[0, first : first + 4, head] + phi.position_embedding
            flat = [float(block[i, h]) for i in range(4) for h in range(5)]
            hidden = []
            for unit in range(7):
                y = sum(value * float(phi.kernel_in[i, unit]) for i, value in enumerate(flat))
                y += float(phi.bias_in[unit])
                hidden.append(0.5 * y * (1 + math.tanh(math.sqrt(2 / math.pi) * (y + 0.044715 * y**3))))
            for h in range(5):
                expected = sum(float(x[0, first + i, head, h]) for i in range(4)) / 4 + float(phi.bias_out[h])
                expected += sum(value * float(phi.kernel_out[unit, h]) for unit, value in enumerate(hidden))
                assert float(out[0, slot, head, h]) == pytest.approx(expected, abs=1e-12)


def test_compressor_of_a_short_row_has_no_block():
    blocks = block_tokens(torch.zeros(3, 3, 2, 5), torch.ones((3, 3), dtype=torch.long), CONFIG)
    assert ref.Compressor(5, CONFIG)(blocks).shape == (3, 0, 2, 5)


def test_gate_is_the_loop_over_units():
    gate = randomised(ref.Gate(12, 2)).requires_grad_(False)
    x = tokens(1, 1, 12)
    hidden = []
    for unit in range(8):
        y = sum(float(x[0, 0, i] * gate.kernel_in[i, unit]) for i in range(12)) + float(gate.bias_in[unit])
        hidden.append(y / (1 + math.exp(-y)))
    for head in range(2):
        for branch in range(3):
            y = sum(value * float(gate.kernel_out[unit, head, branch]) for unit, value in enumerate(hidden))
            expected = 1 / (1 + math.exp(-y - float(gate.bias_out[head, branch])))
            assert float(gate(x)[0, 0, head, branch]) == pytest.approx(expected, abs=1e-12)


@pytest.mark.parametrize("width", [1, 2, 5, 6])
def test_rotary_turns_half_split_pairs_and_spares_an_odd_last_dim(width):
    x = tokens(1, 1, 1, width)
    turned = rotate(x, torch.tensor([[3]]), 10000.0)[0, 0, 0]
    half = width // 2
    for i in range(half):
        pair = complex(x[0, 0, 0, i], x[0, 0, 0, half + i])
        angle = 3 * 10000.0 ** (-i / half)
        expected = pair * complex(math.cos(angle), math.sin(angle))
        # Numbers in float64 with at most ten roundings of angles below 3.
        assert float(turned[i]) == pytest.approx(expected.real, abs=30 * 2**-53 * abs(pair))
        assert float(turned[half + i]) == pytest.approx(expected.imag, abs=30 * 2**-53 * abs(pair))
    assert width % 2 == 0 or turned[-1] == x[0, 0, 0, -1]


def test_shifting_all_positions_changes_nothing():
    """Rotary is relative. A shift of 100,000 adds half ticks, which float32 rounds: 2.2e-12 rad."""
    module, x = layer(), tokens(1, 29, 12)
    index = torch.arange(29)[None]
    out, shifted = module(x), module(x, positions=index + 100_000)
    assert (out - shifted).abs().max() <= 4 * 2.2e-12 * out.abs().max()
    assert torch.equal(out, module(x, positions=index))
    assert (out - module(x, positions=2 * index)).abs().max() > 1e-2


def test_packed_row_equals_each_sequence_alone():
    module = layer()
    row = [0, 0] + [5] * 11 + [3] * 3 + [0] + [8] * 19
    x = tokens(1, len(row), 12)
    together = module(x, segment_ids=torch.tensor([row]))
    for name in (5, 3, 8):
        part = [s for s, other in enumerate(row) if other == name]
        torch.testing.assert_close(together[:, part], module(x[:, part]), atol=1e-12, rtol=1e-12)
    assert (together[:, [0, 1, 16]] == 0).all()


@pytest.mark.parametrize("compression", ["mlp", "mean"])
@pytest.mark.parametrize("length", [1, 3, 30])
def test_step_by_step_decode_equals_the_full_forward(compression, length):
    module, x = layer(compression=compression), tokens(2, length, 12)
    torch.testing.assert_close(module.decode(x), module(x), atol=1e-12, rtol=1e-12)
    torch.testing.assert_close(module.decode(x, length - 1), module(x)[:, -1:], atol=1e-12, rtol=1e-12)


OPTIONS = {
    "normed": dict(normalize_qk=True, scale=0.7),
    "shared": dict(share_keys_values=True, normalize_qk=True),
    "own parts": dict(
        compressor=lambda *_: lambda blocks: blocks.amax(dim=2),
        gate=lambda _, num_heads: lambda x: x[..., : 3 * num_heads].unflatten(-1, (num_heads, 3)),
        rotary=lambda heads, positions: heads,
    ),
}


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS.keys())
def test_steps_with_options_equal_the_full_forward(options):
    module, x = layer(**options), tokens(2, 20, 12)
    torch.testing.assert_close(module.decode(x), module(x), atol=1e-12, rtol=1e-12)
    assert (module(x) - layer()(x)).abs().max() > 1e-2


INDEXERS = {
    "slc": dict(branches=("slc",), selector=ref.IndexerConfig(dim=6)),
    "slc and win, weighted": dict(
        branches=("slc", "win"), selector=ref.IndexerConfig(num_heads=2, dim=6, weighted=True, normalize=True)
    ),
    "cmp and slc, shared": dict(
        branches=("cmp", "slc"), selector=ref.IndexerConfig(dim=6), share_keys_values=True
    ),
    "all, of dense heads": dict(
        selector=ref.IndexerConfig(num_heads=2, dim=4, shared_key=False, slow_pairs=True)
    ),
}


def turned(heads, positions, options):
    """Whole, or heads of four, whose pairs are the last two of the four of a head of eight."""
    if not options.slow_pairs:
        return rotate(heads, positions, 10000.0)
    pairs = heads.unflatten(-1, (2, 2))
    frequencies = torch.tensor([10000.0 ** (-i / 4) for i in (2, 3)], dtype=torch.float64)
    angles = positions[..., None] * frequencies
    turns = torch.polar(torch.ones_like(angles), angles)[:, :, None]
    found = torch.complex(pairs[..., 0, :], pairs[..., 1, :]) * turns
    return torch.cat([found.real, found.imag], dim=-1)


@pytest.mark.parametrize("options", INDEXERS.values(), ids=INDEXERS.keys())
def test_branches_and_an_indexer_are_their_operations(options):
    """Packed: queries, keys and weights of the indexer by hand, and only the branches that there are."""
    module, options = layer(config=ONE_LOCAL, **options), options["selector"]
    part, norm = module.selector, torch.nn.functional.rms_norm
    segment_ids = torch.tensor([[0, 0] + [5] * 25 + [3] * 3])
    positions = torch.tensor([[0, 1, *range(25), *range(3)]])
    x = tokens(1, 30, 12)
    asked = torch.einsum("btd,dkje->btkje", x, part.query_proj.kernel)
    key = torch.einsum("btd,die->btie", x, part.key_proj.kernel)
    if options.normalize:
        asked = norm(asked, (6,), part.query_norm.scale, 1e-6)
        key = norm(key, (6,), part.key_norm.scale, 1e-6)
    asked = torch.stack([turned(asked[:, :, :, j], positions, options) for j in range(options.num_heads)], 3)
    weights = torch.einsum("btd,dkj->btkj", x, part.weight_proj.kernel) if options.weighted else None
    where = dict(config=ONE_LOCAL, segment_ids=segment_ids)
    key = turned(key, positions, options)
    scores = ref.block_scores(asked, key, weights=weights, **where)
    torch.testing.assert_close(module.block_scores(x, segment_ids), scores, atol=1e-12, rtol=1e-12)

    blocks = masks.top_blocks(scores, segment_ids, torch.arange(30)[None], ONE_LOCAL)
    query, key_cmp, value_cmp, key_slc, value_slc, key_win, value_win, gates = module.operands(x, segment_ids)
    outs = []
    if key_cmp is not None:
        outs.append(ref.compressed_attention(query, key_cmp, value_cmp, **where)[0])
    outs.append(ref.selected_attention(query, key_slc, value_slc, blocks, **where)[0])
    if key_win is not None:
        outs.append(ref.window_attention(query, key_win, value_win, **where)[0])
    assert len(outs) == len(module.branches)
    expected = outs[0] if gates is None else sum(o * gates[..., i, None] for i, o in enumerate(outs))
    torch.testing.assert_close(
        module(x, segment_ids=segment_ids), module.out_proj(expected), atol=1e-12, rtol=1e-12
    )
    torch.testing.assert_close(module.decode(x), module(x), atol=1e-12, rtol=1e-12)


def test_absent_branches_have_no_parameters():
    names = {
        name.partition(".")[0] for name, _ in layer(config=ONE_LOCAL, **INDEXERS["slc"]).named_parameters()
    }
    assert names == {"query_proj", "key_slc_proj", "value_slc_proj", "out_proj", "selector"}
    with refused(ValueError, r"importance needs the compressed branch, got branches=\('slc',\)"):
        layer(branches=("slc",))


@pytest.mark.parametrize("distil", ["dense", "selected"])
@pytest.mark.parametrize(
    ("options", "learns"), [(INDEXERS["slc and win, weighted"], "selector."), ({}, "compressor_key.")],
    ids=["indexer", "importance"],
)  # fmt: skip
def test_selection_loss_of_a_layer_teaches_what_selects_alone(options, learns, distil):
    """The mean over queries and KV heads, padding left out; the output is that without a loss."""
    module = layer(config=TWO_FREE, **options)
    row = [0, 0] + [5] * 25 + [3] * 3
    x, segment_ids = tokens(1, 30, 12).requires_grad_(), torch.tensor([row])
    out, loss = module(x, segment_ids=segment_ids, distil=distil)
    assert torch.equal(out, module(x, segment_ids=segment_ids))

    parameters = dict(module.named_parameters())
    gradients = torch.autograd.grad(loss, [x, *parameters.values()], allow_unused=True)
    taught = {name for name, g in zip(("x", *parameters), gradients, strict=True) if g is not None}
    assert taught == {name for name in parameters if name.startswith(learns)}
    assert all(g.abs().max() > 1e-4 for g in gradients if g is not None)

    query, _, _, key, *_ = module.operands(x, segment_ids)
    scores, where = module.block_scores(x, segment_ids), dict(config=TWO_FREE, segment_ids=segment_ids)
    blocks = masks.top_blocks(scores, segment_ids, torch.arange(30)[None], TWO_FREE)
    total = 0.0
    for t in range(2, 30):
        own = (t - 2 if t < 27 else t - 27) // TWO_FREE.selection_block_size
        for head in range(2):
            chosen = blocks[0, t, head].tolist()
            free = range(1, own) if distil == "dense" else sorted({*chosen} - {-1, 0, own})
            if not free:
                continue
            if distil == "dense":
                target = ref.block_probabilities(query, key, **where)[0, t, head, free]
            else:
                of_slots = ref.selected_probabilities(query, key, blocks, **where)[0, t, head]
                target = of_slots[[chosen.index(block) for block in free]]
            own_scores = scores[0, t, head, list(free)]
            own_scores = own_scores if options else own_scores.log()
            share, log_softmax = target / target.sum(), own_scores.log_softmax(0)
            total += (share * (share.log() - log_softmax)).sum().item()
    assert loss.item() == pytest.approx(total / 28 / 2, abs=1e-12)


def test_own_parts_are_used():
    x = tokens(1, 20, 12)
    query, key_cmp, value_cmp, *_, gates = layer(**OPTIONS["own parts"]).operands(x)
    plain = layer(rotary=OPTIONS["own parts"]["rotary"])
    assert torch.equal(query, plain.query_proj(x))
    for kind, compressed in (("key", key_cmp), ("value", value_cmp)):
        tokens_of = getattr(plain, f"{kind}_cmp_proj")(x)
        maxima = [tokens_of[:, start : start + 4].amax(dim=1) for start in range(0, 17, 2)]
        assert torch.equal(compressed, torch.stack(maxima, dim=1))
    assert torch.equal(gates, x.reshape(1, 20, 4, 3))


def test_a_shared_pair_is_three_equal_pairs():
    shared, separate = layer(share_keys_values=True), layer()
    weights = separate.state_dict()
    for name, value in shared.state_dict().items():
        kind, _, rest = name.partition("_")
        if kind in ("key", "value"):
            weights |= {f"{kind}_{branch}_{rest}": value for branch in ("cmp", "slc", "win")}
        else:
            weights[name] = value
    separate.load_state_dict(weights)
    x = tokens(2, 25, 12)
    assert torch.equal(shared(x), separate(x))


def test_the_future_changes_no_past_output():
    module, x = layer(), tokens(1, 30, 12)
    out = module(x)
    changed = x.clone()
    changed[:, 17:] = 100.0
    assert torch.equal(module(changed)[:, :17], out[:, :17])


def test_gradients_of_every_parameter_pass_gradcheck():
    module, x = layer(), tokens(1, 18, 12).requires_grad_()
    names = [name for name, _ in module.named_parameters()]
    chosen = ref.select_blocks(*module.operands(x)[:2], config=CONFIG)

    def forward(x, *parameters):
        weights = dict(zip(names, parameters, strict=True))
        return torch.func.functional_call(module, weights, (x,), {"block_indices": chosen})

    leaves = [x, *(p.detach().requires_grad_() for p in module.parameters())]
    assert torch.autograd.gradcheck(forward, leaves, eps=1e-6, atol=1e-4, rtol=1e-3, fast_mode=True)


def test_gates_start_as_told():
    made = ref.NSAAttention(4, 12, num_kv_heads=2, config=CONFIG, initial_gates=(0.02, 0.96, 0.02))

    gates = made.gate(torch.randn(2, 7, 12))

    torch.testing.assert_close(gates, torch.tensor([0.02, 0.96, 0.02]).expand(2, 7, 4, 3))
