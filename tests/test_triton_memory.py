"""How much memory the Triton kernels need at 64k tokens: XLA compiles for an H100 that is not there.

Also which kernels remat runs twice, and that programs with vmap, export and shards lower for CUDA.
"""

import collections
import functools
import re

import jax
import jax.export
import jax.numpy as jnp
import jaxlib
import numpy as np
import pytest

WHERE = "installed by `tox -e test`; not a dependency of nsa_jax"
pytest.importorskip("jax_triton", reason=f"needs jax-triton, {WHERE}", exc_type=ImportError)
pytest.importorskip("jax_cuda13_plugin", reason=f"needs jax-cuda13-plugin, {WHERE}", exc_type=ImportError)
pytest.importorskip("jax_plugins.xla_cuda13", reason=f"needs jax-cuda13-pjrt, {WHERE}", exc_type=ImportError)

import triton_compile  # noqa: E402
from equations import equations  # noqa: E402
from flax import nnx  # noqa: E402
from jax.sharding import AbstractDevice, AbstractMesh, AxisType, NamedSharding, PartitionSpec  # noqa: E402
from modules import abstract  # noqa: E402

from benchmarks import inputs, strategies  # noqa: E402
from nsa_jax import attention, call_log, layout, use_implementation  # noqa: E402
from nsa_jax.config import NSAConfig  # noqa: E402
from nsa_jax.kernels.triton.nonfinite import (  # noqa: E402
    Branch,
    Outputs,
    recompute_forward,
    visible_in_blocks,
)
from nsa_jax.kernels.triton.sizes.selected import item_queries  # noqa: E402
from nsa_jax.kernels.triton.sizes.selection import SelectionSizes  # noqa: E402
from nsa_jax.model import Transformer, TransformerConfig  # noqa: E402
from nsa_jax.nn import NSAAttention  # noqa: E402
from nsa_jax.remat import SAVED_NAMES  # noqa: E402

CONFIG = NSAConfig()
LENGTH, HEADS, KV_HEADS, DIM = 65536, 64, 4, 128
MOST = 5.5e9  # bytes besides inputs, output and gradients
SLACK = 1.15


def operands(length=LENGTH, batch=1):
    def array(*last):
        return jax.ShapeDtypeStruct((batch, *last), jnp.bfloat16)

    compressed = layout.num_compression_blocks(length, CONFIG)
    keys = [array(n, KV_HEADS, DIM) for n in (compressed, compressed, *[length] * 4)]
    return array(length, HEADS, DIM), *keys, array(length, HEADS, 3)


def attend(*operands, implementation="triton", **places):
    run = functools.partial(attention.native_sparse_attention, implementation=implementation)
    return run(*operands, config=CONFIG, **places)


def forward_and_backward(function, d_out, *operands):
    out, pull_back = jax.vjp(function, *operands)
    return out, pull_back(d_out)


def pull_back(residuals, d_out):
    return residuals(d_out)


def program(kind):
    """A function and the shapes of its arguments; residuals of the forward are arguments of the backward."""
    arguments = operands()
    if kind == "forward":
        return attend, arguments
    if kind == "forward and backward":
        return functools.partial(forward_and_backward, attend), (arguments[0], *arguments)
    with triton_compile.device(90):
        residuals = jax.eval_shape(lambda *x: jax.vjp(attend, *x)[1], *arguments)
    return pull_back, (residuals, arguments[0])


def formula(kind) -> float:
    """Bytes besides inputs, output and gradients, at the fullest moment."""
    branch = LENGTH * HEADS * DIM * 2
    row = LENGTH * HEADS * 4  # a float32 for each row
    indices = LENGTH * KV_HEADS * CONFIG.num_selected_blocks * 4
    scores = SelectionSizes().buffer_bytes
    # The selection is stored together with the first branch: its lists take two numbers for each pair, and
    # `selection` stores the log-sum-exps in another order. Without gradients, the window's kernel adds the
    # two stored branches to its own.
    selecting = branch + 2 * row + 2 * indices + scores
    forward = max(selecting, 2 * branch + 3 * row + indices)

    # A branch reads the query gradient that the branch before it left, and writes another; one of the two is
    # the result. Delta, products and gate are one number for each row. Later, the gradient of the selected
    # keys sorts pairs by block and stores partial sums: at most two slots for each full item of queries.
    pairs = LENGTH * KV_HEADS * CONFIG.num_selected_blocks
    slots = 2 * pairs // item_queries(HEADS // KV_HEADS, pairs)
    partials = slots * CONFIG.selection_block_size * 2 * DIM * 4
    d_query = branch
    backward = max(d_query + 6 * row + 2 * indices, 6 * row + 4 * indices + partials)
    if kind == "forward":
        return forward
    if kind == "backward":
        return backward
    # The first query gradient is written while the outputs of all three branches are stored, the second
    # while two outputs and the first gradient are.
    return 3 * branch + d_query + 6 * row + indices


@pytest.mark.parametrize("kind", ["forward", "backward", "forward and backward"])
def test_memory_follows_the_formula(kind):
    function, arguments = program(kind)

    executable = triton_compile.compile_for_h100(function, *arguments)

    found = executable.memory_analysis().temp_size_in_bytes
    assert found <= SLACK * formula(kind), (
        f"{found / 1e9:.3f} GB, by the formula {formula(kind) / 1e9:.3f} GB"
    )
    assert found <= MOST
    shapes = set(re.findall(r"\b[a-z]+\d+\[([\d,]+)\]", executable.as_text()))
    elements = {shape: int(np.prod([int(x) for x in shape.split(",")])) for shape in shapes}
    assert elements[f"1,{LENGTH},{HEADS},{DIM}"] == max(elements.values()) < LENGTH * LENGTH / 4


def test_a_layer_more_stores_no_more_than_its_input():
    """What kernels begin to write is memory that XLA could reserve for all layers at once."""
    mesh = triton_compile.mesh_of_h100s(x=1)

    def on_it(x):
        return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=NamedSharding(mesh, PartitionSpec()))

    def bytes_of(layers):
        sizes = dict(vocab_size=256, model_dim=256, num_heads=9, num_kv_heads=3, head_dim=64)
        config = TransformerConfig(**sizes, num_layers=layers, dtype="bfloat16", remat=True)
        graph, state = nnx.split(abstract(Transformer, config))
        arguments = jax.tree.map(on_it, (state, jax.ShapeDtypeStruct((4, 8192), jnp.int32)))
        gradient = jax.grad(lambda state, tokens: nnx.merge(graph, state)(tokens).astype(jnp.float32).sum())
        with use_implementation("triton"):
            return triton_compile.compile_on(mesh, gradient, *arguments).memory_analysis().temp_size_in_bytes

    of_input = 4 * 8192 * 256 * 2
    assert bytes_of(3) - bytes_of(2) <= 1.1 * of_input


def test_a_benchmark_of_a_million_tokens_is_drawn_on_one_gpu():
    """The largest steps of `strategies.draw`: queries of 17 GB, and the blocks of one KV head at a time."""
    shape = inputs.Shape(
        length=2**20, query_heads=HEADS, kv_heads=KV_HEADS, key_dim=DIM, value_dim=DIM, dtype="bfloat16"
    )
    query, key, *_ = operands(shape.length)
    head = jax.ShapeDtypeStruct((), jnp.int32)

    def step(function, *arguments):
        found = triton_compile.compile_for_h100(function, *arguments).memory_analysis()
        sizes = found.argument_size_in_bytes, found.output_size_in_bytes, found.temp_size_in_bytes
        return sum(sizes)

    def choose(query, key_blocks, head):
        return strategies.choose_head(query, key_blocks, head, "mosaic_gpu", shape)

    assert step(lambda: inputs.tensor("query", shape)) < 18e9
    assert step(choose, query, key, head) < 27e9


def traced(function, *arguments):
    with triton_compile.device(90):
        return list(equations(jax.make_jaxpr(function)(*arguments).jaxpr))


def launches(function) -> collections.Counter:
    """How often each kernel is launched by `function` and its gradient."""
    arguments = operands(4096)
    program = traced(functools.partial(forward_and_backward, function), arguments[0], *arguments)
    return collections.Counter(x.params["name"] for x in program if x.primitive.name == "triton_kernel_call")


FORWARD = {
    "nsa_compressed_forward": 1,
    "nsa_selected_forward": 1,
    "nsa_window_forward": 1,
    "nsa_native_recompute_forward": 1,
    "nsa_importance": 1,
    "nsa_best_blocks": 1,
}


@pytest.mark.parametrize("kind", ["plain", "saved", "nothing saved"])
def test_remat_runs_the_forward_kernels(kind):
    """Once if the named results are saved, twice if nothing is; each backward kernel once."""
    policies = {
        "saved": jax.checkpoint_policies.save_only_these_names(*SAVED_NAMES),
        "nothing saved": jax.checkpoint_policies.nothing_saveable,
    }
    found = launches(attend if kind == "plain" else jax.checkpoint(attend, policy=policies[kind]))

    times = 2 if kind == "nothing saved" else 1
    assert {name: found[name] for name in FORWARD} == {name: times * n for name, n in FORWARD.items()}
    backward = {name: n for name, n in found.items() if name.endswith(("_query_gradient", "_key_gradients"))}
    branches = ("compressed", "selected", "window")
    kinds = ("query_gradient", "key_gradients")
    names = {f"nsa_{branch}_{kind}" for branch in branches for kind in (*kinds, "recompute_key_gradients")}
    assert backward == dict.fromkeys(names | {"nsa_native_recompute_query_gradient"}, 1)


def with_gradients(d_out, *operands):
    return forward_and_backward(attend, d_out, *operands)


def test_vmap_becomes_a_larger_batch():
    arguments = operands(4096)
    mapped = [jax.ShapeDtypeStruct((3, *x.shape), x.dtype) for x in (arguments[0], *arguments)]

    program = traced(jax.vmap(with_gradients), *mapped)
    with triton_compile.without_code_of_kernels():
        text = triton_compile.lower(jax.vmap(with_gradients), *mapped).as_text()

    calls = [x for x in program if x.primitive.name == "triton_kernel_call"]
    assert len(calls) == len(
        [
            x
            for x in traced(with_gradients, arguments[0], *arguments)
            if x.primitive.name == "triton_kernel_call"
        ]
    )
    assert "triton_kernel_call_ffi" in text


def test_export_for_cuda():
    arguments = operands(4096)
    check = jax.export.DisabledSafetyCheck.custom_call("triton_kernel_call_ffi")
    with triton_compile.without_code_of_kernels(), triton_compile.device(90):
        export = jax.export.export(jax.jit(with_gradients), platforms=["cuda"], disabled_checks=[check])
        exported = export(arguments[0], *arguments)

    restored = jax.export.deserialize(exported.serialize())

    assert restored.platforms == ("cuda",)
    assert "triton_kernel_call_ffi" in restored.mlir_module()


def test_a_step_that_names_nothing_is_exported_with_kernels_if_the_device_is_said(caplog, monkeypatch):
    """Otherwise a warning says that it has none, and once."""
    monkeypatch.setattr(call_log, "_warned", set())
    layer = abstract(
        NSAAttention, HEADS, 256, num_kv_heads=KV_HEADS, head_dim=DIM, config=CONFIG, dtype="bfloat16"
    )
    cache = jax.eval_shape(lambda: layer.init_cache(2, 4096))
    x = jax.ShapeDtypeStruct((2, 1, 256), jnp.bfloat16)
    graph, state = nnx.split(layer)
    check = jax.export.DisabledSafetyCheck.custom_call("triton_kernel_call_ffi")

    def exported():  # a function of its own: one that was traced for another device is not traced again
        step = jax.jit(lambda state, x, cache: nnx.merge(graph, state).decode_step(x, cache))
        return jax.export.export(step, platforms=["cuda"], disabled_checks=[check])(
            state, x, cache
        ).mlir_module()

    with triton_compile.without_code_of_kernels(), triton_compile.device(90):
        assert "triton_kernel_call_ffi" in exported()
    assert caplog.messages == []
    for _ in range(2):
        assert "triton_kernel_call_ffi" not in exported()
    (told,) = caplog.messages
    assert re.search(r"test_triton_memory.py:\d+: decode_step runs as xla, many times as slow", told)
    assert "Name the GPU" in told


def test_export_of_a_step_with_a_cache_in_int8():
    layer = abstract(
        NSAAttention, HEADS, 256, num_kv_heads=KV_HEADS, head_dim=DIM, config=CONFIG, dtype="bfloat16"
    )
    cache = jax.eval_shape(lambda: layer.init_cache(2, 4096, dtype="int8"))
    graph, state = nnx.split(layer)
    leaves, tree = jax.tree.flatten((state, jax.ShapeDtypeStruct((2, 1, 256), jnp.bfloat16), cache))

    def step(*leaves):  # a file holds arrays alone
        state, x, cache = jax.tree.unflatten(tree, leaves)
        return jax.tree.leaves(nnx.merge(graph, state).decode_step(x, cache))

    check = jax.export.DisabledSafetyCheck.custom_call("triton_kernel_call_ffi")
    with triton_compile.without_code_of_kernels(), triton_compile.device(90):
        exported = jax.export.export(jax.jit(step), platforms=["cuda"], disabled_checks=[check])(*leaves)

    restored = jax.export.deserialize(exported.serialize())

    assert "triton_kernel_call_ffi" in restored.mlir_module()
    assert sum(x.dtype == np.int8 for x in restored.in_avals) == 6
    assert sum(x.dtype == np.int8 for x in restored.out_avals) == 6


@pytest.mark.parametrize("check_vma", [True, False])
def test_shards_of_kv_heads_exchange_nothing(check_vma):
    device = AbstractDevice(triton_compile.DEVICE_KINDS[90], 132, platform="gpu")
    mesh = AbstractMesh((2,), ("x",), (AxisType.Auto,), abstract_device=device)
    shard = PartitionSpec(None, None, "x")
    arguments = [x.update(shape=(*x.shape[:2], 2 * x.shape[2], x.shape[3])) for x in operands(4096)]
    in_shards = jax.shard_map(
        with_gradients, mesh=mesh, in_specs=shard, out_specs=(shard, shard), check_vma=check_vma
    )

    with triton_compile.without_code_of_kernels(), jax.sharding.use_abstract_mesh(mesh):
        text = (
            jax.jit(in_shards).trace(arguments[0], *arguments).lower(lowering_platforms=("cuda",)).as_text()
        )

    assert "triton_kernel_call_ffi" in text
    assert f"tensor<1x4096x{HEADS}x{DIM}xbf16>" in text
    exchanges = r"stablehlo\.(all_gather|all_reduce|all_to_all|collective_\w+|reduce_scatter)"
    assert not re.findall(exchanges, text)


COLLECTIVES = {"all_gather", "all_to_all", "ppermute", "psum", "psum_invariant", "reduce_scatter"}


def collectives(function, mesh, *arguments) -> list[str]:
    """What moves between devices in what JAX traces, for which no kernel must be compiled."""
    with jax.sharding.use_abstract_mesh(mesh):
        program = list(equations(jax.make_jaxpr(function)(*arguments).jaxpr))
    assert "triton_kernel_call" in {x.primitive.name for x in program}
    return [x.primitive.name for x in program if x.primitive.name in COLLECTIVES or gathers(x)]


def gathers(equation) -> bool:
    """Whether an array is resharded so that an axis is no longer split as it was."""
    if equation.primitive.name != "reshard":
        return False
    before, after = (x.aval.sharding.spec for x in (*equation.invars, *equation.outvars))
    return any(x is not None and x != y for x, y in zip(before, after, strict=True))


@pytest.mark.parametrize("implementation", ["triton", "mosaic_gpu"])
@pytest.mark.parametrize("tokens", [False, True], ids=["query heads", "query tokens"])
def test_shards_of_queries_share_keys(tokens, implementation):
    """The devices add up the gradients of keys and values that all of them hold."""
    device = AbstractDevice(triton_compile.DEVICE_KINDS[90], 132, platform="gpu")
    mesh = AbstractMesh((2,), ("x",), (AxisType.Auto,), abstract_device=device)
    shard, whole = PartitionSpec(None, *[None] * (not tokens), "x"), PartitionSpec()
    _, *keys_values, _ = operands(4096)
    keys_values = [jax.ShapeDtypeStruct((1, x.shape[1], 1, DIM), x.dtype) for x in keys_values]
    query, gates = (jax.ShapeDtypeStruct((1, 4096, 16, dim), jnp.bfloat16) for dim in (DIM, 3))
    specs = (shard, *[whole] * 6, shard)

    def run(positions, d_out, *operands):
        rows = dict(query_positions=positions, implementation=implementation)
        return forward_and_backward(functools.partial(attend, **rows), d_out, *operands)

    in_shards = jax.shard_map(
        run, mesh=mesh, in_specs=(shard if tokens else whole, shard, *specs), out_specs=(shard, specs)
    )
    positions = jax.ShapeDtypeStruct((1, 4096), jnp.int32)

    found = collectives(in_shards, mesh, positions, query, query, *keys_values, gates)

    assert found == ["psum_invariant"] * 6


@pytest.mark.parametrize("implementation", ["triton", "mosaic_gpu"])
def test_explicit_axes_exchange_nothing(implementation):
    """Plain `jit` on a mesh of `jax.make_mesh`: batch rows over one axis, heads over the other."""
    device = AbstractDevice(triton_compile.DEVICE_KINDS[90], 132, platform="gpu")
    mesh = AbstractMesh((2, 4), ("data", "tensor"), (AxisType.Explicit,) * 2, abstract_device=device)
    place = jax.NamedSharding(mesh, PartitionSpec("data", None, "tensor"))
    arguments = [jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=place) for x in operands(4096, batch=2)]

    run = functools.partial(forward_and_backward, functools.partial(attend, implementation=implementation))

    assert collectives(jax.jit(run), mesh, arguments[0], *arguments) == []


def test_no_scan_takes_the_place_of_a_result_that_is_written_in_place():
    """XLA may let a call write straight into its slice of the array in which a scan stacks outputs.

    A call that works in place writes into its operand instead, so the slice would keep its old contents.
    """
    arguments = operands(1024)

    def scanned(d_out, *operands):
        def step(carry, _):
            out, gradients = with_gradients(carry, *operands)
            return gradients[0], (attend(carry, *operands[1:]), out, gradients)

        return jax.lax.scan(step, d_out, None, length=3)

    assert not fusions_that_write_in_place(scanned, arguments[0], *arguments)


def test_a_slice_that_is_written_in_place_is_a_copy():
    """XLA may fuse a slice with the call that reads it. The fusion has a result of its own.

    A call that works in place writes into its operand instead, so that result would never be written.
    """
    query, _, _, key, value, *_ = operands(1024)
    out, lse = (
        jax.ShapeDtypeStruct((1, 1100, HEADS, *x), y) for x, y in (((DIM,), "bfloat16"), ((), "float32"))
    )

    def recompute(out, lse, query, key, value):
        placement = layout.place(CONFIG, batch=1, num_queries=1024, num_keys=1024)
        blocks = jnp.zeros((1, 1024, KV_HEADS, 4), jnp.int32)
        visible = visible_in_blocks(blocks, placement, 1024)
        found = Outputs((out[:, :1024],), lse[:, :1024])
        return recompute_forward(found, query, [Branch(key, value, visible)], scale=0.1)

    assert not fusions_that_write_in_place(recompute, out, lse, query, key, value)


def scanned_gradients(query, *others):
    """Of three layers in a scan that stores what remat policies may keep."""
    saved = jax.checkpoint_policies.save_only_these_names(*SAVED_NAMES)

    def scanned(query, *others):
        layer = jax.checkpoint(lambda x: attend(x, *others), policy=saved)
        out, _ = jax.lax.scan(lambda x, _: (layer(x), None), query, None, length=3)
        return out.astype(jnp.float32).sum()

    return jax.grad(scanned, range(8))(query, *others)


def test_a_barrier_is_before_each_result_that_a_scan_may_store():
    """Without it XLA of jaxlib 0.11 may launch its kernel twice."""
    with triton_compile.device(90):
        found = [*equations(jax.make_jaxpr(scanned_gradients)(*operands(4096)).jaxpr)]
    behind = {out for one in found if one.primitive.name == "optimization_barrier" for out in one.outvars}
    named = [one for one in found if one.primitive.name == "name" and one.params["name"] in SAVED_NAMES]

    assert len(named) >= 7  # of each branch two, and the blocks
    assert all(one.invars[0] in behind for one in named)


@pytest.mark.skipif(
    jaxlib.version.__version_info__ >= (0, 12), reason="jaxlib 0.12 does so without a barrier"
)
def test_no_kernel_whose_result_a_scan_stores_is_launched_twice():
    lowered = (
        triton_compile.lower(scanned_gradients, *operands(4096)).as_text().count("triton_kernel_call_ffi")
    )
    text = triton_compile.compile_for_h100(scanned_gradients, *operands(4096)).as_text()
    assert 10 < text.count('custom_call_target="triton_kernel_call_ffi"') <= lowered


def fusions_that_write_in_place(function, *arguments) -> set[str]:
    """Names of the fusions, in the program of an H100, that hold a call that writes to its operand."""
    text = triton_compile.compile_for_h100(function, *arguments).as_text()
    in_place = {
        name
        for name, body in re.findall(r"^%?([\w.-]+) [^\n]*\{\n(.*?)^\}", text, flags=re.M | re.S)
        if "output_to_operand_aliasing" in body
    }
    assert in_place, "no call writes in place"
    return in_place.intersection(re.findall(r"fusion\(.*calls=%?([\w.-]+)", text))


def test_vmap_of_gradients_without_compressed_keys():
    """Rows shorter than a compression block have an axis of length 0, beside the one that `vmap` adds."""
    arguments = operands(16)
    mapped = [jax.ShapeDtypeStruct((3, *x.shape), x.dtype) for x in (arguments[0], *arguments)]

    with triton_compile.device(90):
        _, gradients = jax.eval_shape(jax.vmap(with_gradients), *mapped)

    assert [x.shape for x in gradients] == [x.shape for x in mapped[1:]]
