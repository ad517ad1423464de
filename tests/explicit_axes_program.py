"""Run by test_explicit_axes with eight host devices: what runs on explicit axes equals what one device gives.

The mesh is that of `jax.make_mesh`: batch rows over `data`, heads over `tensor`, parameters over `fsdp`.
"""

import dataclasses
import functools
import re
import sys
import time
import warnings

import fewer_collections  # noqa: F401
import jax
import jax.numpy as jnp
import numpy as np
from cases import OVERLAPPING, Case
from flax import nnx
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P
from modules import MODEL, abstract, randomised
from small_layer import KV_HEADS, ROWS, WIDTH, WeightedSum, make_layer, random

from nsa_jax import attention, reference
from nsa_jax.generate import Batcher, advance, extend, gather, repeat, session, start
from nsa_jax.model import Transformer, token_chunks, token_divergences, token_losses
from nsa_jax.nn import IndexerConfig

RUNS = (((0, 2), (7, 13), (2, 3), (9, 6)), ((3, 8), (4, 1), (8, 15)))
CASE = Case(name="explicit", num_keys=24, runs=RUNS, num_heads=4, key_dim=4, value_dim=3)
SHARDING = {"model": "fsdp", "heads": "tensor", "kv_heads": "tensor", "mlp": "tensor", "vocab": "tensor"}
TOLERANCE = 1e-10  # float64 sums of at most a few hundred terms, in another order
jit = functools.partial(jax.jit, compiler_options={"xla_backend_optimization_level": 0})
mesh = jax.make_mesh((2, 2, 2), ("data", "fsdp", "tensor"))


def put(tree, *spec):
    """Arrays on the mesh; each is sharded as far as it has so many axes.

    They come from NumPy, since JAX compiles a program for each shape to cut what lies on a device.
    """
    return jax.tree.map(
        lambda x: jax.device_put(np.asarray(x), jax.NamedSharding(mesh, P(*spec[: jnp.ndim(x)]))), tree
    )


def agree(found, expected):
    for ours, theirs in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(np.asarray(ours), np.asarray(theirs), rtol=TOLERANCE, atol=TOLERANCE)


def specs(tree):
    return [jax.typeof(x).sharding.spec for x in jax.tree.leaves(tree)]


def values_and_gradients(positions, segment_ids, cotangents, *operands):
    def attend(*operands):
        query, key_cmp, value_cmp, *_ = operands
        shared = dict(config=OVERLAPPING, query_positions=positions, segment_ids=segment_ids)
        out = attention.native_sparse_attention(*operands, **shared)
        return out, *attention.compressed_attention(query, key_cmp, value_cmp, **shared)

    results, pull_back = jax.vjp(attend, *operands)
    return results, pull_back(cotangents)


def drawn():
    """NumPy arrays: JAX compiles a program for each shape to divide what lies on one device."""
    shapes = ((2, 24, 4, 3), (2, 24, 4, 3), (2, 24, 4))
    cotangents = tuple(random(*shape, seed=i) for i, shape in enumerate(shapes))
    return CASE.query_positions, CASE.segment_ids, cotangents, *CASE.draw()


@functools.cache
def whole():
    """The values and gradients of one device."""
    return jit(values_and_gradients)(*drawn())


def operations() -> None:
    """Values and gradients of packed rows; the same types where only queries are sharded."""
    found = jit(values_and_gradients)(*put(drawn(), "data", None, "tensor"))
    agree(found, whole())
    assert {spec[2] for spec in specs(found)} == {"tensor"}
    assert {spec[0] for spec in specs(found)} == {"data"}
    positions, segment_ids, cotangents, query, *others = put(drawn())
    by_heads = put((cotangents, query), None, None, "tensor")
    results, gradients = jax.eval_shape(values_and_gradients, positions, segment_ids, *by_heads, *others)
    assert {x.sharding.spec[2] for x in (*results, gradients[0])} == {"tensor"}
    assert {x.sharding.spec[2] for x in gradients[1:]} == {None}


def indexer() -> None:
    """Scores with their gradients, and selections; rows alone split a head of keys for all KV heads.

    Such a head does what equal heads do, and its gradient is the sum of theirs.
    """
    positions, segment_ids, *_ = drawn()
    shapes = (2, 24, 2, 3, 4), (2, 24, 2, 4), (2, 24, 2, 3), (2, 24, 2, 4)
    query, keys, weights, cotangent = (random(*shape, seed=i) for i, shape in enumerate(shapes))
    key = keys[:, :, :1]

    @jit
    def run(positions, segment_ids, query, key, weights, cotangent):
        shared = dict(config=OVERLAPPING, query_positions=positions, segment_ids=segment_ids)

        def score(query, key, weights):
            return attention.block_scores(query, key, weights=weights, **shared)

        scores, pull_back = jax.vjp(score, query, key, weights)
        blocks = attention.select_by_index(query, key, weights=weights, **shared)
        chosen = attention.block_scores(query, key, weights=weights, block_indices=blocks, **shared)
        return (scores, blocks, attention.top_blocks(scores, **shared), chosen), pull_back(cotangent)

    for given, equal, by_heads in ((keys, keys, "tensor"), (key, key.repeat(2, axis=2), None)):
        arrays = positions, segment_ids, query, given, weights, cotangent
        found = run(*(put(x, "data", None, by_heads if x is given else "tensor") for x in arrays))
        values, (d_query, d_key, d_weights) = run(positions, segment_ids, query, equal, weights, cotangent)
        if given is key:
            d_key = np.sum(d_key, axis=2, keepdims=True)
        agree(found, (values, (d_query, d_key, d_weights)))
        assert set(specs(found[0])) == {P("data", None, "tensor", None)}
        assert found[1][1].sharding.spec == P("data", None, by_heads, None)


def eager_calls() -> None:
    """An eager call takes NumPy arrays beside sharded ones, and compiles nothing when it comes again.

    It needs no mesh in context.
    """
    positions, segment_ids, _, query, *keys_values, _ = drawn()
    positions, segment_ids = jnp.asarray(positions), jnp.asarray(segment_ids)
    given = dict(config=OVERLAPPING, query_positions=positions, segment_ids=segment_ids)
    compiled: list[str] = []
    jax.monitoring.register_event_duration_secs_listener(lambda event, *_, **__: compiled.append(event))
    query_on_mesh = put(query, "data", None, "tensor")
    for turn in range(2):
        compiled.clear()
        with jax.set_mesh(mesh):
            found = attention.compressed_attention(query_on_mesh, *keys_values[:2], **given)
        assert any("backend_compile" in event for event in compiled) == (turn == 0)
    assert specs(found) == [P("data", None, "tensor", None), P("data", None, "tensor")]
    agree(found, whole()[0][1:])
    outside = attention.compressed_attention(query_on_mesh, *keys_values[:2], **given)
    assert specs(outside) == specs(found)
    agree(outside, found)


def the_reference() -> None:
    """The reference, which is plain JAX, traces on explicit axes too, and leaves its results there."""
    positions, segment_ids, _, *operands = drawn()

    def attend(positions, segment_ids, *operands):
        rows = dict(query_positions=positions, segment_ids=segment_ids)
        return reference.native_sparse_attention(*operands, config=OVERLAPPING, **rows)

    found = jax.eval_shape(attend, *put((positions, segment_ids, *operands), "data", None, "tensor"))
    assert found.shape == whole()[0][0].shape
    assert found.sharding.spec == P("data", None, "tensor", None)


def shards() -> None:
    """Inside `shard_map`, over tokens and over KV heads. Heads need nothing of each other, and trace alone.

    Keys that all devices hold get the sum of the gradients that the devices find.
    """
    positions, segment_ids, cotangents, query, *keys_values, gates = drawn()

    def in_shards(queries, keys, positions_spec):
        operands = (queries, *[keys] * len(keys_values), queries)
        return jax.shard_map(
            values_and_gradients,
            mesh=jax.make_mesh((2,), ("x",), (AxisType.Auto,), devices=jax.devices()[:2]),
            in_specs=(positions_spec, P(), queries, *operands),
            out_specs=(queries, operands),
        )

    by_tokens, by_heads = P(None, "x"), P(None, None, "x")
    given = positions, segment_ids, cotangents, query, *keys_values, gates
    agree(jit(in_shards(by_tokens, P(), by_tokens))(*given), whole())
    of_heads = jax.eval_shape(in_shards(by_heads, by_heads, P()), *given)
    assert jax.tree.map(jnp.shape, of_heads) == jax.tree.map(jnp.shape, whole())
    of_one_head = (x[:, :, :1] for x in keys_values)
    shared = in_shards(by_heads, P(), P())  # its out_specs say that no device has gradients of its own
    jax.eval_shape(shared, positions, segment_ids, cotangents, query, *of_one_head, gates)


def targets() -> None:
    """What a selection is taught with, on explicit axes: the values of one device.

    It traces inside `shard_map`, too, where heads need nothing of each other.
    """
    positions, segment_ids, _, query, key_cmp, _, key, *_ = drawn()

    def teach(positions, segment_ids, query, key_cmp, key):
        shared = dict(config=OVERLAPPING, query_positions=positions, segment_ids=segment_ids)
        blocks = attention.select_blocks(query, key_cmp, **shared)
        slots = attention.selected_probabilities(query, key, blocks, **shared)
        target = attention.block_probabilities(query, key, **shared)

        def loss(query, key_cmp):
            scores = attention.importance_scores(query, key_cmp, **shared)
            return attention.selection_loss(scores[..., : target.shape[-1]], target)

        losses, pull_back = jax.vjp(loss, query, key_cmp)
        return target, slots, losses, *pull_back(jnp.sin(losses))

    given = positions, segment_ids, query, key_cmp, key
    expected = jit(teach)(*given)
    found = jit(teach)(*put(given, "data", None, "tensor"))
    agree(found, expected)
    assert {tuple(spec[:3]) for spec in specs(found)} == {("data", None, "tensor")}
    by_heads = (P(), P(), *[P(None, None, "x")] * 3)
    in_shards = jax.shard_map(
        teach, mesh=jax.make_mesh((2,), ("x",), (AxisType.Auto,), devices=jax.devices()[:2]),
        in_specs=by_heads, out_specs=by_heads[2],
    )  # fmt: skip
    assert jax.tree.map(jnp.shape, jax.eval_shape(in_shards, *given)) == jax.tree.map(jnp.shape, expected)


def layers() -> None:
    """A layer in steps. Its compressor is a function to the cache; an indexer selects.

    Packed rows and steps with given blocks are traced: all that takes a device's own heads is an operation.
    """
    x, counts = random(ROWS, 15, WIDTH), np.array([9, 4, 0, 7])
    ids = np.array([[1] * 5 + [0] + [2] * 9] * ROWS)

    @jit
    def call(layer, x, ids):
        return layer(x, segment_ids=ids)

    @jit
    def begin(layer, x):
        return layer.prefill(x[:, :9], layer.init_cache(ROWS, 16), num_tokens=counts)

    step = jit(lambda layer, x, held: layer.decode_step(x, held))
    every = jit(lambda layer, x, held, blocks: layer.decode_step(x, held, block_indices=blocks))

    def on_mesh(layer):
        def by_heads(x):
            if x.ndim < 3:
                return put(x)
            if x.shape[-1] == WIDTH:
                return put(x, "tensor")
            return put(x, None, "tensor" if x.shape[1] > 1 else None)  # an index key for all heads

        graph, state = nnx.split(layer)
        return nnx.merge(graph, jax.tree.map(by_heads, state)), put(x, "data"), put(ids, "data")

    by_index = dict(param_dtype=jnp.float64, selector=IndexerConfig(dim=4))
    plain = make_layer(compressor=WeightedSum, **by_index)
    # What each row read, side by side: a packed row of one sequence.
    rows, real = np.zeros_like(x), (np.arange(15) < counts[:, None] + 6).astype(int)
    for row, n in enumerate(counts):
        rows[row, : n + 6] = np.concatenate([x[row, :n], x[row, 9:]])
    slots = plain.config.num_selected_blocks  # enough for all blocks of 12 tokens, as scores choose them
    blocks = np.broadcast_to(np.arange(slots, dtype=np.int32), (ROWS, 3, KV_HEADS, slots))
    with jax.set_mesh(mesh):
        layer, *arrays = on_mesh(plain)
        packed = jax.eval_shape(call, layer, *arrays)
        first, held = begin(layer, arrays[0])
        given, _ = jax.eval_shape(every, layer, arrays[0][:, 9:12], held, blocks)
        second, held = step(layer, put(x[:, 9:12], "data"), held)
        third, held = step(layer, put(x[:, 12:], "data"), held)
        without_compression, *arrays = on_mesh(make_layer(branches=("slc", "win"), **by_index))
        _, few = jax.eval_shape(begin, without_compression, arrays[0])
        jax.eval_shape(step, without_compression, arrays[0][:, 9:12], few)
    outputs, later = np.asarray(first), np.concatenate([second, third], axis=1)
    expected = np.asarray(call(plain, rows, real))
    for row, n in enumerate(counts):
        agree(np.concatenate([outputs[row, :n], later[row]]), expected[row, : n + 6])
    assert [each.sharding.spec for each in (packed, first, given, third)] == [P("data", None, None)] * 4


def model(**changes):
    """A model on one device, and the same on the mesh with parameters sharded as `SHARDING` says."""
    config = dataclasses.replace(
        MODEL,
        vocab_size=12,
        model_dim=16,
        dtype="float64",
        param_dtype="float64",
        **dict(num_layers=1) | changes,
    )
    plain = randomised(abstract(Transformer, config), 0.3)
    with jax.set_mesh(mesh):
        places = nnx.state(nnx.eval_shape(lambda: Transformer(config, sharding=SHARDING, rngs=nnx.Rngs(0))))
    graph, state = nnx.split(plain)
    leaves = zip(jax.tree.leaves(state), jax.tree.leaves(places), strict=True)
    sharded = [put(x, *place.sharding.spec) for x, place in leaves]
    return plain, nnx.merge(graph, jax.tree.unflatten(jax.tree.structure(state), sharded))


@functools.partial(jit, static_argnums=0)
def loss_and_gradient(graph, state, tokens):
    def loss(state):
        logits = nnx.merge(graph, state)(tokens)
        return -(jax.nn.log_softmax(logits) ** 3).mean(), logits

    return jax.value_and_grad(loss, has_aux=True)(state)


def training() -> None:
    """The loss of a model and the gradient of every parameter, sharded as the parameter is.

    Rows are computed in two chunks of queries, without the mesh in context. Layers of NSA are traced alone:
    operations has their gradients, and train_mesh_program those of their parameters.
    """
    plain, sharded = model(attention="dense", tie_embeddings=False)
    tokens = np.random.default_rng(0).integers(0, 12, (4, 300))
    graph, state = nnx.split(sharded)
    found = loss_and_gradient(graph, state, put(tokens, ("data", "fsdp")))
    agree(found, loss_and_gradient(*nnx.split(plain), tokens))
    assert specs(found[1]) == specs(state)
    graph, state = nnx.split(model(tie_embeddings=False)[1])
    _, without_mesh = loss_and_gradient.eval_shape(graph, state, tokens)  # NumPy's lie on no mesh
    with jax.set_mesh(mesh):
        _, gradient = loss_and_gradient.eval_shape(graph, state, put(tokens, "data"))
    for each in (gradient, without_mesh):
        assert [x.sharding.spec for x in jax.tree.leaves(each)] == specs(state)


def losses() -> None:
    """The loss in chunks: tokens over one axis or two, the vocabulary over another; also on auto axes."""
    token_chunks.LOGITS_AT_ONCE = 2 * 12 * 3
    rng = np.random.default_rng(0)
    x, kernel, cotangent = rng.standard_normal((4, 14, 8)), rng.standard_normal((8, 12)), rng.random((4, 14))
    targets, teacher = rng.integers(-1, 12, (4, 14)), rng.standard_normal((8, 12))

    @jit
    def values_and_gradients(x, kernel, targets, cotangent):
        def both(x, kernel):
            return token_losses(x, kernel, targets), token_divergences(x, kernel, jnp.sin(x), teacher)

        found, pull_back = jax.vjp(both, x, kernel)
        return *pull_back((cotangent, 2 * cotangent)), found

    expected = values_and_gradients(x, kernel, targets, cotangent)
    auto = jax.make_mesh(mesh.axis_sizes, mesh.axis_names, (AxisType.Auto,) * 3)
    for axes, by_tokens, by_columns in (
        (mesh, P("data", "fsdp"), P("fsdp", "tensor")),
        (mesh, P(None, "fsdp"), P(None, ("data", "tensor"))),
        (auto, P("data", "fsdp"), P("fsdp", "tensor")),
    ):
        places = P(*by_tokens, *[None] * (2 - len(by_tokens)), None), by_columns, by_tokens, by_tokens
        given = zip((x, kernel, targets, cotangent), places, strict=True)
        put_there = [jax.device_put(each, jax.NamedSharding(axes, place)) for each, place in given]
        found = values_and_gradients(*put_there)
        agree(found, expected)
        if axes == mesh:
            assert specs(found[:2]) == specs(put_there[:2])
    of_whole = values_and_gradients.eval_shape(*put((x, kernel, targets, cotangent)))
    assert {entry for spec in specs(of_whole) for entry in spec} == {None}

    tokens, ids = rng.integers(0, 12, (4, 17)), np.array([[1] * 5 + [2] * 9 + [0] * 3] * 4)

    @functools.partial(jit, static_argnums=0)
    def of_packed_rows(graph, state, tokens):
        return jax.value_and_grad(lambda state: nnx.merge(graph, state).loss(tokens, segment_ids=ids))(state)

    # Types alone: above are the values of the loss and of a gradient, and sessions has those of such layers.
    with jax.set_mesh(mesh):
        for changes in (dict(num_layers=2, scan_layers=True), dict(tie_embeddings=False)):
            graph, state = nnx.split(model(attention="dense", **changes)[1])
            _, gradient = of_packed_rows.eval_shape(graph, state, put(tokens, ("data", "fsdp")))
            assert [x.sharding.spec for x in jax.tree.leaves(gradient)] == specs(state)


def sessions() -> None:
    """All options of a session, a turn and copied rows give the same tokens where rows are sharded."""
    tokens, turn = np.random.default_rng(0).integers(0, 12, (2, 4, 9)).astype(np.int32)
    options = dict(max_length=40, lengths=np.array([7, 2, 9, 5]), temperature=np.array([0, 1, 2, 1.5]))
    options |= dict(min_p=0.01, repetition_penalty=1.2, presence_penalty=0.3, stop=[[1, 2], [3]], logprobs=2)

    def written(model, place):
        session = start(model, place(tokens), **options)
        session, first = advance(session, 4)
        copies = repeat(gather(session, np.array([1, 3])), 2)
        session = extend(session, place(turn), lengths=np.array([2, 0, 9, 1]))
        session, second = advance(session, 4)
        copied = copies.lengths, jax.random.key_data(copies.rows.keys), copies.rows.cache
        return (first, second, copied), copies, session.rows.cache

    plain, sharded = model(attention="dense")
    expected, *_ = written(plain, lambda x: x)
    with jax.set_mesh(mesh):
        found, copies, (held,) = written(sharded, lambda x: put(x, "data"))
        jax.eval_shape(lambda copies: advance(copies, 4), copies)
    agree(found, expected)
    assert held.key.sharding.spec[:3] == ("data", None, "tensor")
    assert found[0].tokens.sharding.spec[0] == "data"


def requests() -> None:
    """A Batcher of a model that is divided gives the same tokens, with one program for a size of parts."""
    plain, sharded = model(attention="dense")
    prompt = np.random.default_rng(0).integers(0, 12, 150)
    with jax.set_mesh(mesh), warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)  # of arrays that are donated in vain
        batcher = Batcher(sharded, 2, max_length=160, prefill_chunk=64, sampling=())
        before = session._extend._cache_size()
        asked = [batcher.submit(prompt, max_new_tokens=5) for _ in range(2)]
        found = [[token for piece in request for token in piece.tokens] for request in asked]
    assert found[0] == found[1]
    logits = jit(Transformer.__call__)(plain, np.array([[*prompt, *found[0]]]))
    assert logits[0, -6:-1].argmax(-1).tolist() == found[0]
    assert session._extend._cache_size() == before + 1


def caches() -> None:
    """A program makes each part of an empty cache where it belongs, and prefill and a step leave it there.

    No device ever has all of it. It is of int8, so it has scales, which are shorter arrays.
    """
    plain, sharded = model()
    tokens = np.random.default_rng(0).integers(0, 12, (4, 4))
    whole = jax.jit(functools.partial(plain.init_cache, 4, 512, dtype="int8"))()
    by_rank = {1: P("data"), 3: P("data", None, "tensor"), 4: P("data", None, "tensor")}
    auto = jax.make_mesh(mesh.axis_sizes, mesh.axis_names, (AxisType.Auto,) * 3)
    for axes in (mesh, auto):
        with jax.set_mesh(axes):
            wanted = jax.tree.map(lambda x: by_rank[x.ndim], whole)
            make = functools.partial(sharded.init_cache, 4, 512, dtype="int8")
            program = jax.jit(make, out_shardings=wanted).lower().compile()
            memory, held = program.memory_analysis(), program()
        assert memory.output_size_in_bytes + memory.temp_size_in_bytes < 0.3 * sum(
            x.nbytes for x in jax.tree.leaves(whole)
        )
        for x, spec in zip(jax.tree.leaves(held), jax.tree.leaves(wanted), strict=True):
            assert x.sharding.is_equivalent_to(jax.NamedSharding(axes, spec), x.ndim), x.sharding
        if axes == mesh:
            step = jit(Transformer.decode_step)
            with jax.set_mesh(mesh):
                compiled = step.lower(sharded, put(tokens, "data"), held).compile()
                found = compiled(sharded, put(tokens, "data"), held)
                begun = jax.eval_shape(Transformer.prefill, sharded, put(tokens, "data"), held)
            agree(found, step(plain, tokens, whole))
            for _, left in (found, begun):
                assert [P(*x.sharding.spec[:3]) for x in jax.tree.leaves(left)] == jax.tree.leaves(wanted)
            # A kernel is gathered (FSDP), a cache never: its smallest array is larger than any kernel.
            gathers = re.findall(r"\[([\d,]+)\]\S* all-(?:gather|to-all)", compiled.as_text())
            gathered = [int(np.prod([int(n) for n in shape.split(",")])) for shape in gathers]
            largest = max(x.size for x in jax.tree.leaves(nnx.state(sharded)))
            assert gathered
            assert max(gathered) <= largest < held[0].key_cmp.size // 8


CHECKS = (
    *(operations, indexer, eager_calls, the_reference, shards, targets, layers, training, losses),
    *(sessions, requests, caches),
)


def main() -> int:
    jax.config.update("jax_enable_x64", True)
    for check in CHECKS:
        start = time.perf_counter()
        check()
        print(f"{check.__name__}: ok, {time.perf_counter() - start:.1f} s", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
