"""The first launch of a step: most programs attend to old compressed keys, the others append.

Grid: x = parts times batch rows times KV heads times groups of query rows, which attend (`compressed`, Eq. 4,
8-10); then a program for each batch row and KV head, which appends (`append`, Eq. 7). The few that append
come last: if they came first, some multiprocessors would get three long programs and others two. A cache
without a compressed branch has only programs that append.
"""

import triton
import triton.language as tl

from nsa_jax.kernels.triton.decode.append import Appended, Appending, append_row
from nsa_jax.kernels.triton.decode.compressed import Compressed, attend_part
from nsa_jax.kernels.triton.decode.forming import Forming, OutputLayer, Turning
from nsa_jax.kernels.triton.decode.parts import admit
from nsa_jax.kernels.triton.decode.rounding import Scales
from nsa_jax.kernels.triton.launch import named


@triton.jit(repr=named("nsa_step_first"))
def first_kernel(
    key_slc, value_slc, key_raw_ring, value_raw_ring, key_win_ring, value_win_ring,
    key_slc_scale, value_slc_scale, key_win_ring_scale, value_win_ring_scale,
    lengths, num_tokens, new_key_cmp, new_value_cmp, new_key_slc, new_value_slc, new_key_win, new_value_win,
    given_key, given_value, hidden, key_bias_in, key_kernel_out, key_bias_out,
    value_bias_in, value_kernel_out, value_bias_out, ticks, rest, magnitude, query, key_cmp, value_cmp,
    key_cmp_scale, value_cmp_scale,
    out, sums, scores, tails, tops, placed, block_key, block_value, block_logits, arrivals,
    scale, batch, D: tl.constexpr, X: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Attends to one part, or appends to one row and KV head. In place: selection arrays and rings.

    D are `StepDims`, X a `Tiling`.
    """
    attending = X.SHARES * batch * D.KV_HEADS * X.GROUPS
    pid = tl.program_id(0)
    if key_cmp is not None and pid < attending:
        scales = Scales(key_cmp_scale, value_cmp_scale)
        cmp = Compressed(key_cmp, value_cmp, scales, out, sums, scores, tails, tops)
        attend_part(pid, batch, cmp, lengths, num_tokens, query, scale, D, X, PRECISION)
    else:
        arrays = Appending(
            key_slc=key_slc, value_slc=value_slc, key_raw=key_raw_ring, value_raw=value_raw_ring,
            key_win=key_win_ring, value_win=value_win_ring,
            scales_slc=Scales(key_slc_scale, value_slc_scale),
            scales_win=Scales(key_win_ring_scale, value_win_ring_scale), new_key_cmp=new_key_cmp,
            new_value_cmp=new_value_cmp, new_key_slc=new_key_slc, new_value_slc=new_value_slc,
            new_key_win=new_key_win, new_value_win=new_value_win,
        )  # fmt: skip
        forming = Forming(
            given_key, given_value, hidden, OutputLayer(key_bias_in, key_kernel_out, key_bias_out),
            OutputLayer(value_bias_in, value_kernel_out, value_bias_out), Turning(ticks, rest, magnitude),
        )  # fmt: skip
        found = Appended(placed, block_key, block_value, block_logits, out, sums, arrivals)
        bk = pid - attending
        tokens = admit(lengths, num_tokens, bk // D.KV_HEADS, D.T, D.MAX_LENGTH)
        append_row(arrays, forming, found, query, tokens, bk, X.SHARES, scale, D, PRECISION)
