"""Random selections as other code stores them: token ranges `[start, end)` of each query."""

import torch
from torch import Tensor

from parity import cases


def draw_ranges(case: cases.OperationCase) -> tuple[Tensor, Tensor]:
    """Ranges in the layout `case.ranges`, and the block indices [B, T, K, n] that they mean.

    Neighbouring blocks are one range or several, unused ranges are empty and stand anywhere among the others.
    Some queries select nothing.
    """
    generator = cases.random_generator(case.name + " ranges")
    size, slots = case.config.selection_block_size, case.config.num_selected_blocks
    heads = 1 if case.ranges == "BTn2" else case.num_kv_heads
    ranges = torch.zeros((case.batch, case.length, heads, slots, 2), dtype=torch.int32)
    block_indices = torch.full((case.batch, case.length, heads, slots), -1)
    for row, t, head in torch.cartesian_prod(*map(torch.arange, ranges.shape[:3])).tolist():
        candidates = torch.randperm(t // size + 1, generator=generator)
        count = int(torch.randint(slots + 1, (), generator=generator))
        blocks = candidates[:count].sort().values
        block_indices[row, t, head, : len(blocks)] = blocks
        merge = torch.rand(slots, generator=generator) < 0.5
        spans: list[list[int]] = []
        for block in blocks.tolist():
            end = min((block + 1) * size, t + 1)
            if spans and spans[-1][1] == block * size and merge[block % slots]:
                spans[-1][1] = end
            else:
                spans.append([block * size, end])
        places = torch.randperm(slots, generator=generator)[: len(spans)]
        for place, span in zip(places.tolist(), spans, strict=True):
            ranges[row, t, head, place] = torch.tensor(span)
    block_indices = block_indices.expand(-1, -1, case.num_kv_heads, -1)
    if case.ranges == "BTn2":
        return ranges[:, :, 0], block_indices
    return (ranges[0] if case.ranges == "TKn2" else ranges), block_indices
