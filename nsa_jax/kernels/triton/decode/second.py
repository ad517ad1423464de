"""The second launch of a step: the scores, and beside them the window branch.

Grid: x = window parts times new tokens times KV heads times batch rows, which attend (`window`), for they
take longest; then chunks times as many, which score (`scores`). The scores compare, the window reads:
together they take little more than the longer of the two. Long lists want more warps than a window: it takes
them, too.
"""

import triton
import triton.language as tl

from nsa_jax.kernels.triton.decode.parts import load_placed
from nsa_jax.kernels.triton.decode.scores import Chunking, Scored, score_chunk
from nsa_jax.kernels.triton.decode.window import Lacking, Window, WindowDims, attend_window, complete_cache
from nsa_jax.kernels.triton.launch import named
from nsa_jax.kernels.triton.pieces import Dim


@triton.jit(repr=named("nsa_step_second"))
def second_kernel(
    key_cmp, value_cmp, lengths, overflowed, out, sums,
    placed, query, key_win, value_win, block_key, block_value, block_logits, scores, tails, tops,
    best,
    scale, window_programs, T: tl.constexpr, G: tl.constexpr, PADDED_G: tl.constexpr,
    KV_HEADS: tl.constexpr, SIZE: tl.constexpr, STRIDE: tl.constexpr, OWN: tl.constexpr, BLOCK: tl.constexpr,
    SELECTED: tl.constexpr, INITIAL: tl.constexpr, LOCAL: tl.constexpr, BLOCKS: tl.constexpr,
    TILE_BLOCKS: tl.constexpr, TILES: tl.constexpr, CMP: tl.constexpr, PADDED_CMP: tl.constexpr,
    ALL: tl.constexpr, CHUNK_TILES: tl.constexpr, CHUNKS: tl.constexpr, SLOTS: tl.constexpr,
    RING: tl.constexpr, WINDOW: tl.constexpr, SHARES: tl.constexpr, TILE: tl.constexpr, ROWS: tl.constexpr,
    STAGES: tl.constexpr, MAX_BLOCKS: tl.constexpr, H0: tl.constexpr, H1: tl.constexpr, V0: tl.constexpr,
    V1: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """A part of a window, or the best blocks of a chunk. In place: blocks, lengths, overflows, the parts."""
    pid = tl.program_id(0)
    if pid < window_programs:
        W: tl.constexpr = WindowDims(
            T=T, G=G, KV_HEADS=KV_HEADS, RING=RING, WINDOW=WINDOW, SHARES=SHARES, FIRST=CMP, PARTS=ALL,
            TILE=TILE, ROWS=ROWS, STAGES=STAGES, MAX_BLOCKS=MAX_BLOCKS, SIZE=SIZE, STRIDE=STRIDE,
            BLOCKS=BLOCKS, KEY=Dim(H0, H1), VALUE=Dim(V0, V1),
        )  # fmt: skip
        share = pid % SHARES
        token = pid // SHARES % T
        bk = pid // (SHARES * T)
        tokens = load_placed(placed, bk // KV_HEADS)
        window = Window(key_win, value_win, out, sums)
        attend_window(window, query, tokens, bk, token, share, scale, W, PRECISION)
        if (share == 0) & (token == 0):
            lacking = Lacking(key_cmp, value_cmp, lengths, overflowed, block_key, block_value)
            complete_cache(lacking, tokens, bk // KV_HEADS, bk % KV_HEADS, W)
    else:
        C: tl.constexpr = Chunking(
            T=T, G=G, PADDED_G=PADDED_G, KV_HEADS=KV_HEADS, SIZE=SIZE, STRIDE=STRIDE, OWN=OWN, BLOCK=BLOCK,
            SELECTED=SELECTED, INITIAL=INITIAL, LOCAL=LOCAL, BLOCKS=BLOCKS, TILE_BLOCKS=TILE_BLOCKS,
            TILES=TILES, CMP=CMP, PADDED_CMP=PADDED_CMP, PARTS=ALL, CHUNK_TILES=CHUNK_TILES, CHUNKS=CHUNKS,
            SLOTS=SLOTS,
        )  # fmt: skip
        pid -= window_programs
        bk = pid // (CHUNKS * T)
        tokens = load_placed(placed, bk // KV_HEADS)
        scored = Scored(sums, scores, tails, tops, block_logits)
        score_chunk(scored, best, tokens, bk, pid // CHUNKS % T, pid % CHUNKS, C)
