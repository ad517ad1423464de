"""Where the pairs of each place begin, in all and in each tile, from the counts of `place_counts`.

Two kernels. grid = (ceil(places / 32), lanes): one program per 32 places of a lane adds up their counts over
the tiles, 128 of these at a time: `128 32 / 256` numbers a thread at 8 warps (16). Then grid = (1,): one
program adds up the sums of all lanes and places, 4096 at a time. Floor of the first: to read the counts and
to write as many sums.

Why two: the first has all the bytes, and its programs need nothing of each other. The second has one number
for each lane and place (768 at 8k tokens, K = 3; 8192 at 32k, K = 8).
"""

import triton
import triton.language as tl

from nsa_jax.array_typing import Array, Int32
from nsa_jax.kernels.triton.launch import launch, like, named

PLACES = 32  # of a program: 128 bytes of each tile
TILES = 128  # most tiles that it adds up at a time
SUMS = 4096  # most sums of a step of the second kernel


def place_bounds(
    counts: Int32[Array, "lanes tiles places"],
) -> tuple[Int32[Array, "lanes tiles places"], Int32[Array, " bounds"]]:
    """The counts of a place in the tiles before; the first pair of each lane and place, and all pairs."""
    lanes, tiles, num_places = counts.shape
    number = lanes * num_places
    before, totals = launch(
        sum_counts_kernel, counts, out=(like(counts), like(counts, (number,))),
        grid=(triton.cdiv(num_places, PLACES), lanes), num_warps=8, tiles=tiles, num_places=num_places,
        TILES=min(TILES, triton.next_power_of_2(tiles)), PLACES=PLACES,
    )  # fmt: skip
    bounds = launch(
        place_bounds_kernel, totals, out=like(totals, (number + 1,)), grid=(1,), num_warps=8, number=number,
        SIZE=min(SUMS, triton.next_power_of_2(number)),
    )  # fmt: skip
    return before, bounds


@triton.jit(repr=named("nsa_sum_counts"))
def sum_counts_kernel(
    counts, before, totals, tiles, num_places, TILES: tl.constexpr, PLACES: tl.constexpr
):  # fmt: skip
    """The sums of some places of a lane over the tiles before, and over all tiles."""
    place = tl.program_id(0) * PLACES + tl.arange(0, PLACES)
    exists = place < num_places
    total = tl.zeros([PLACES], tl.int32)
    for first in range(0, tiles, TILES):
        tile = first + tl.arange(0, TILES)
        row = tl.program_id(1).to(tl.int64) * tiles + tile
        at = row[:, None] * num_places + place[None, :]
        inside = (tile < tiles)[:, None] & exists[None, :]
        found = tl.load(counts + at, mask=inside, other=0)
        tl.store(before + at, total[None, :] + tl.cumsum(found, 0) - found, mask=inside)
        total += tl.sum(found, 0)
    tl.store(totals + tl.program_id(1) * num_places + place, total, mask=exists)


@triton.jit(repr=named("nsa_place_bounds"))
def place_bounds_kernel(totals, bounds, number, SIZE: tl.constexpr):
    """The sum of all totals before each, and of all."""
    i = tl.arange(0, SIZE)
    sum_before = 0
    for first in range(0, number, SIZE):
        inside = first + i < number
        found = tl.load(totals + first + i, mask=inside, other=0)
        tl.store(bounds + first + i, sum_before + tl.cumsum(found, 0) - found, mask=inside)
        sum_before += tl.sum(found, 0)
    tl.store(bounds + number, sum_before)
