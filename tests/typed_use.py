"""A user's program that calls everything public, for `mypy --strict` and `pyright`: `tox -e type`.

`assert_type` fails where a result is of another type than is said here; `Any` is of another type than all.
"""
# pyright: strict, reportUnknownMemberType=false
# (jax.numpy annotates its own functions in part only)

from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import replace
from typing import assert_type

import jax
import jax.numpy as jnp
from flax import nnx
from jax.experimental import checkify

import nsa_jax
from nsa_jax import NSAConfig, Run, Runs, convert, debug
from nsa_jax.array_typing import Attended
from nsa_jax.cache import DenseCache, NSACache, Reads, count_reads
from nsa_jax.dispatch import Choice
from nsa_jax.evaluate import BlockRecall, Needles, TokenPairs, block_recall, find_needles
from nsa_jax.generate import (
    Batcher,
    Checkpoint,
    Continuation,
    DraftModel,
    Generation,
    LookUp,
    Piece,
    Session,
    Written,
    advance,
    checkpoint,
    extend,
    generate,
    prepare,
    repeat,
    rewind,
    rewind_to,
    sample,
    start,
    stream,
    truncate,
)
from nsa_jax.model import Transformer, TransformerConfig, next_tokens, token_divergences, token_losses
from nsa_jax.nn import DenseAttention, NSAAttention, Operands, Selection, rotate

CONFIG = NSAConfig(
    compression_block_size=8,
    compression_stride=4,
    selection_block_size=8,
    num_selected_blocks=4,
    window_size=16,
)
LENGTH, LAST = 40, 8


def operations() -> None:
    """Every operation, on queries that are all tokens of the row, and on those that are its last."""
    query = jnp.ones((1, LENGTH, 4, 16))
    key = value = jnp.ones((1, LENGTH, 2, 16))
    key_cmp = value_cmp = jnp.ones((1, 9, 2, 16))
    gates = jnp.ones((1, LENGTH, 4, 3))

    cmp = nsa_jax.compressed_attention(query, key_cmp, value_cmp, config=CONFIG)
    assert_type(cmp, Attended)
    assert_type(cmp.out, jax.Array)
    out, lse = cmp
    assert_type(lse, jax.Array)

    blocks = nsa_jax.select_blocks(query, key_cmp, lse_cmp=lse, config=CONFIG)
    assert_type(blocks, jax.Array)
    query_index, key_index = jnp.ones((1, LENGTH, 2, 1, 8)), jnp.ones((1, LENGTH, 1, 8))
    scores = nsa_jax.block_scores(query_index, key_index, config=CONFIG)
    assert_type(scores, jax.Array)
    assert_type(nsa_jax.top_blocks(scores, config=CONFIG), jax.Array)
    assert_type(nsa_jax.select_by_index(query_index, key_index, config=CONFIG), jax.Array)
    slc = nsa_jax.selected_attention(query, key, value, blocks, config=CONFIG, implementation="xla")
    assert_type(slc, Attended)

    target = nsa_jax.block_probabilities(query, key, config=CONFIG, lse=lse, reduce="max")
    assert_type(target, jax.Array)
    slots = nsa_jax.selected_probabilities(query, key, blocks, config=CONFIG)
    assert_type(slots, jax.Array)
    scores = nsa_jax.importance_scores(query, key_cmp, config=CONFIG, lse_cmp=lse)
    assert_type(nsa_jax.selection_loss(scores[..., : target.shape[-1]], target), jax.Array)

    last = Runs((Run(LAST, LENGTH - LAST),), divisor=LAST)
    win = nsa_jax.window_attention(query[:, -LAST:], key, value, config=CONFIG, query_positions=last)
    assert_type(win, Attended)

    total = nsa_jax.gated_sum(out, slc.out, out, gates)
    assert_type(total, jax.Array)
    keys_values = key_cmp, value_cmp, key, value, key, value
    whole = nsa_jax.native_sparse_attention(query, *keys_values, gates, config=CONFIG)
    assert_type(whole, jax.Array)


def choice() -> None:
    """What runs, and why."""
    query, key = jnp.ones((1, LENGTH, 4, 16)), jnp.ones((1, LENGTH, 2, 16))
    chosen = nsa_jax.choose("window_attention", query, key, key, config=CONFIG, platform="cpu")
    assert_type(chosen, Choice)
    assert_type(chosen.refused, tuple[tuple[str, str], ...])
    assert_type(nsa_jax.unsupported_reason("gated_sum", "xla"), str | None)
    with nsa_jax.use_implementation("xla"):
        assert_type(nsa_jax.window_attention(query, key, key, config=CONFIG), Attended)


def conversions() -> None:
    """Indices from other forms."""
    segment_ids = convert.segment_ids_from_cu_seqlens(jnp.array([0, 24, LENGTH]), LENGTH)
    assert_type(segment_ids, jax.Array)
    ranges = jnp.array([[[[[0, 8]]]]])
    blocks = nsa_jax.block_indices_from_ranges(
        ranges, layout="BTKn2", query_positions=jnp.array([[30]]), config=CONFIG
    )
    assert_type(blocks, jax.Array)


def checks() -> None:
    """Checks of the values of indices."""
    checked = debug.checked(nsa_jax.select_blocks)
    query, key_cmp = jnp.ones((1, LENGTH, 4, 16)), jnp.ones((1, 9, 2, 16))

    def run() -> jax.Array:
        return checked(query, key_cmp, config=CONFIG)

    _, blocks = checkify.checkify(run)()
    assert_type(blocks, jax.Array)


def layers() -> None:
    """A layer, forward and step by step."""
    layer = NSAAttention(4, 64, num_kv_heads=2, config=CONFIG, rngs=nnx.Rngs(0))
    x = jnp.ones((1, LENGTH, 64))
    assert_type(layer(x), jax.Array)
    assert_type(layer(x, distil="dense"), tuple[jax.Array, jax.Array])
    assert_type(layer.operands(x), Operands)
    assert_type(layer.inspect(x), Selection)
    cache = layer.init_cache(1, LENGTH + 2)
    assert_type(cache, NSACache)
    assert_type(layer.prefill(x, cache), tuple[jax.Array, NSACache])
    assert_type(layer.decode_step(x[:, :1], cache), tuple[jax.Array, NSACache])
    reads = count_reads(cache, layer.operands(x[:, :1]).query, config=CONFIG)
    assert_type(reads, Reads)
    assert_type(reads.slc, jax.Array)

    dense = DenseAttention(4, 64, num_kv_heads=2, rngs=nnx.Rngs(0))
    assert_type(dense(x), jax.Array)
    assert_type(rotate(jnp.ones((1, LENGTH, 4, 16)), jnp.arange(LENGTH)[None]), jax.Array)


class Letters:
    """Stands for a tokenizer."""

    def decode(self, ids: Sequence[int]) -> str:
        return "".join(chr(ord("a") + token % 26) for token in ids)


MODEL = TransformerConfig(
    vocab_size=32,
    num_layers=1,
    model_dim=64,
    num_heads=4,
    num_kv_heads=2,
    nsa=CONFIG,
    attention=("nsa",),
    window_size=[None],
    rope_base=(1e4,),
)


def language_model() -> None:
    """A model, and its losses."""
    assert_type(MODEL.per_layer, tuple[TransformerConfig, ...])
    model = Transformer(MODEL, rngs=nnx.Rngs(0))
    prompts = jnp.ones((1, LENGTH), jnp.int32)
    assert_type(model(prompts), jax.Array)
    assert_type(model(prompts, distil="selected"), tuple[jax.Array, jax.Array])
    assert_type(model.loss(prompts), jax.Array)
    assert_type(model.loss(prompts, distil="dense", reduce=None), tuple[jax.Array, jax.Array])
    assert_type(model.loss(prompts, distil="dense", teacher=model), tuple[jax.Array, ...])
    targets, outputs = next_tokens(prompts), (jnp.ones((1, LENGTH, 64)), jnp.ones((64, 32)))
    assert_type(targets, jax.Array)
    assert_type(token_losses(*outputs, targets), jax.Array)
    assert_type(token_divergences(*outputs, *outputs), jax.Array)
    assert_type(model.inspect(prompts), list[Selection])
    caches = model.init_cache(1, LENGTH + 2)
    assert_type(caches, tuple[NSACache | DenseCache, ...])
    logits, caches = model.prefill(prompts, caches)
    assert_type(logits, jax.Array)
    assert_type(
        model.decode_step(prompts[:, :1], caches), tuple[jax.Array, tuple[NSACache | DenseCache, ...]]
    )
    assert_type(truncate(logits, top_k=3), jax.Array)
    keys = jax.random.split(jax.random.key(0), logits.shape[0])
    assert_type(sample(logits, keys), jax.Array)


def evaluation() -> None:
    """What a model finds."""
    model = Transformer(MODEL, rngs=nnx.Rngs(0))
    assert_type(block_recall(model, jnp.ones((1, LENGTH), jnp.int32)), BlockRecall)


# The models that write are dense, which takes less time to compile.
DENSE = replace(MODEL, attention="dense")


def sessions() -> None:
    """Texts that go on, and back."""
    model = prepare(Transformer(DENSE, rngs=nnx.Rngs(0)))
    assert_type(model, Transformer)
    prompts = jnp.ones((1, 5), jnp.int32)
    session = start(model, prompts, max_length=64, temperature=jnp.ones(1), stop=[[1, 2]], eos_id=[3, 4])
    assert_type(session, Session)
    assert_type(advance(repeat(session, 1), 4), tuple[Session, Continuation])
    session = extend(session, prompts)
    past = checkpoint(session)
    assert_type(past, Checkpoint)
    assert_type(rewind_to(rewind(session, 0), past), Session)
    assert_type(start(model, prompts, max_length=64, drafts=DraftModel(model)), Session)


def written_text() -> None:
    """The text that a model writes."""
    model = Transformer(DENSE, rngs=nnx.Rngs(0))
    prompts = jnp.ones((1, 5), jnp.int32)
    pairs = TokenPairs(names=[1], values=[2, 3])
    assert_type(find_needles(model, pairs, jnp.ones(9, jnp.int32), lengths=[8], batch=1), Needles)
    text = generate(model, prompts, max_new_tokens=3)
    assert_type(text, Generation)
    assert_type(text.tokens, jax.Array)
    assert_type(text.check().ended, jax.Array)
    pieces = stream(start(model, prompts, max_length=64), 4)
    for piece in pieces:
        assert_type(piece, Piece)
        assert_type(piece.check().text, tuple[str, ...] | None)
    assert_type(aiter(pieces), AsyncIterator[Piece])
    batcher = Batcher(model, 2, max_length=64, tokenizer=Letters(), drafts=LookUp())
    for written in batcher.submit([1, 2], max_new_tokens=4, temperature=0.5, stop=[[1, 2], "end"]):
        assert_type(written, Written)
        assert_type(written.tokens, list[int])
    assert_type(batcher.step(), bool)


# Traced alone, which takes no compiler.
TRACED: tuple[Callable[[], None], ...] = (operations, choice, checks, layers, language_model, sessions)
RUN: tuple[Callable[[], None], ...] = (conversions, evaluation, written_text)

if __name__ == "__main__":
    for part in TRACED:
        jax.eval_shape(part)
    for part in RUN:
        part()
