"""The second launch of a step: scores, window, selected branch, and the gated sum (Eq. 4, 5, 8-12).

Grid: x = shares times new tokens times KV heads times batch rows. The SLC programs of one new token and KV
head are a team, and each is a share of it. The shares divide each piece of work: they write the lists of best
blocks (`scores`), attend to the selected blocks (`selected`) and merge the query heads (`merge`). Before the
last two the team waits until all shares are ready (`arrivals`), which takes less time than a launch. WIN
shares attend to the window (`window`) before the first wait, while the others finish their lists. The order
is that in which the pieces of work need each other's results. If the blocks are given, there are no lists,
and the team waits once. A branch that is absent has no parts; without the compressed one blocks are given.

Of the tiles only the query lasts through all of them, in shared memory. Registers are those of the piece that
needs most: at 8 rows of 64k tokens (64 heads, 4 KV heads, 128/128, bfloat16) that is `merge`, with
`HEADS PADDED V / (32 num_warps)` = 64 floats a thread, and the kernel has 121. Where there are more programs
than `sizes.STEP_PROGRAMS`, 16-bit dtypes are held to 128 (64 at 32 warps), so that at least 512 threads fit
on a multiprocessor. Shared memory in 16-bit dtypes, below 64 rows: the larger one of window and selected
branch, `(ROWS H + (stages - 1) keys (H + V) + ROWS keys) itemsize`, where keys and stages are TILE and
WIN_STAGES, or `STEP PADDED_BLOCK` and SLC_STAGES: 4 + 64 + 2 = 70 KB with 3 stages (8 rows), which lets three
programs share an H100 multiprocessor, and 38 KB with 2. At 64 rows Hopper uses wgmma: one tile more, and no
probabilities.
"""

import triton
import triton.language as tl

from nsa_jax.kernels.triton.decode.arrivals import arrive, wait_for
from nsa_jax.kernels.triton.decode.merge import Merging, merge_heads
from nsa_jax.kernels.triton.decode.pairs import cut_query
from nsa_jax.kernels.triton.decode.parts import load_placed, load_query, rows_of_token
from nsa_jax.kernels.triton.decode.rounding import Scales
from nsa_jax.kernels.triton.decode.scores import Scored, score_chunk
from nsa_jax.kernels.triton.decode.selected import Selected, attend_selected
from nsa_jax.kernels.triton.decode.window import Lacking, Window, attend_window, complete_cache
from nsa_jax.kernels.triton.launch import named


@triton.jit(repr=named("nsa_step_second"))
def second_kernel(
    key_cmp, value_cmp, key_cmp_scale, value_cmp_scale, lengths, overflowed, out, sums, arrivals,
    placed, query, gates, key_slc, value_slc, key_slc_scale, value_slc_scale,
    key_win, value_win, key_win_scale, value_win_scale, block_key, block_value, block_logits,
    scores, tails, tops, given,
    merged, chosen, best,
    scale, C: tl.constexpr, W: tl.constexpr, S: tl.constexpr, P: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """One share of a team. In place: compressed keys and values, lengths, overflows, parts, counters.

    C is a `Chunking`, and W, S and P are `WindowDims`, `SelectedDims` and `PartDims`.
    """
    T: tl.constexpr = P.T
    G: tl.constexpr = P.G
    KV_HEADS: tl.constexpr = P.KV_HEADS
    WIN: tl.constexpr = P.WIN
    SLC: tl.constexpr = P.SLC
    share = tl.program_id(0) % SLC
    team = tl.program_id(0) // SLC
    token = team % T
    bk = team // T
    b = bk // KV_HEADS
    kv_head = bk % KV_HEADS
    arrived = arrivals + team
    tokens = load_placed(placed, b)
    rows = rows_of_token(token, S.ROWS, G, KV_HEADS)
    q = cut_query(load_query(query, b, kv_head, rows, T, G, KV_HEADS, S.KEY), key_slc_scale, S.KEY)
    if given is None:
        scored = Scored(sums, scores, tails, tops, block_logits)
        for chunk in tl.range(share, C.CHUNKS, SLC, num_stages=1):
            score_chunk(scored, best, tokens, bk, token, chunk, C)
        arrive(arrived)

    if WIN > 0 and share >= SLC - WIN:
        window = Window(key_win, value_win, Scales(key_win_scale, value_win_scale), out, sums)
        attend_window(window, q, rows, tokens, bk, token, share - (SLC - WIN), scale, W, PRECISION)

    if given is None:
        wait_for(arrived, SLC)
    scales = Scales(key_slc_scale, value_slc_scale)
    selected = Selected(key_slc, value_slc, scales, given, best, chosen, out, sums)
    attend_selected(selected, q, rows, tokens, bk, token, share, scale, S, PRECISION)
    arrive(arrived)
    if (share == 0) & (token == 0):
        scales_cmp = Scales(key_cmp_scale, value_cmp_scale)
        lacking = Lacking(key_cmp, value_cmp, scales_cmp, lengths, overflowed, block_key, block_value)
        complete_cache(lacking, tokens, b, kv_head, W)

    wait_for(arrived, 2 * SLC if given is None else SLC)
    merging = Merging(out, sums, gates, merged)
    for first in tl.range(share * P.HEADS, G, SLC * P.HEADS, num_stages=1):
        merge_heads(merging, tokens, bk, token, first, P)
