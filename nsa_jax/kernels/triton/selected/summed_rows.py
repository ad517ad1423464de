"""The queries of a program that adds up parts: which they are, and which of their slots have a part.

A part is written for a slot that holds a block which the query sees, and for no other.
"""

from typing import NamedTuple

import triton
import triton.language as tl

from nsa_jax.kernels.triton.loading import Rows


class Summed(NamedTuple):
    """Rows of a program, each a query with one of the padded query heads of a KV head.

    Attributes:
      within, head: query of each row, counted from the first of the chunk, and query head of the KV head.
      inside: whether there is such a row.
      start, last_key: first key of the query's sequence, and last key that the query sees.
      slots: where the blocks of its slots begin.
      result: where the rows lie in `[B T N, D]`.
    """

    within: tl.tensor
    head: tl.tensor
    inside: tl.tensor
    start: tl.tensor
    last_key: tl.tensor
    slots: tl.tensor
    result: Rows


@triton.jit
def summed_rows(
    chunk, both, block_indices, last_keys, sequence_starts, num_queries, chunk_queries,
    KV_HEADS: tl.constexpr, G: tl.constexpr, PADDED_G: tl.constexpr, TOKENS: tl.constexpr, R: tl.constexpr,
):  # fmt: skip
    """The rows of the program's TOKENS queries; `both` is `b K + k`, `chunk` as in `Chunks.table`."""
    row = tl.arange(0, TOKENS * PADDED_G)
    token = row // PADDED_G
    head = row % PADDED_G
    within = tl.program_id(0) * TOKENS + token
    first_query = tl.load(chunk + 1) + tl.program_id(0) * TOKENS
    inside = (within < chunk_queries) & (first_query + token < num_queries) & (head < G)
    kv_head = both % KV_HEADS
    first_query += (both // KV_HEADS).to(tl.int64) * num_queries
    at = first_query + token
    return Summed(
        within, head, inside,
        start=tl.load(sequence_starts + at, mask=inside, other=0),
        last_key=tl.load(last_keys + at, mask=inside, other=-1),
        slots=block_indices + (at * KV_HEADS + kv_head) * R,
        result=Rows((first_query * KV_HEADS + kv_head) * G, token * (KV_HEADS * G) + head, inside),
    )  # fmt: skip


@triton.jit
def has_part(summed, slot, R: tl.constexpr, BLOCK: tl.constexpr):
    """Whether a slot of each row has a part."""
    block = tl.load(summed.slots + slot, mask=summed.inside & (slot < R), other=-1)
    return (block >= 0) & (summed.start + block * BLOCK <= summed.last_key)
