"""What several GPUs would take, from what one takes for its share: a prediction, not a measurement.

The time is that of the slowest share and, one after the other, that of all messages at the rate of the data
sheet. A real program hides some messages behind its kernels, and real messages are slower than the sheet.
"""

from collections.abc import Sequence

import jax.numpy as jnp

from benchmarks.records import ParallelRow

# NVIDIA's data sheet of the HGX H200: 900 GB/s of NVLink for each GPU, half of it in each direction.
NVLINK_BYTES_PER_S = 450e9


def num_devices(share: ParallelRow) -> int:
    """The number of devices of which a row has one device's share."""
    return int(share.mesh.split()[-1])


def received_bytes(share: ParallelRow) -> float:
    """Bytes that each device receives from others in zigzag order, in the modes `fwd` and `fwd_bwd`."""
    devices, size = num_devices(share), share.config
    token = share.kv_heads * (share.key_dim + share.value_dim) * jnp.dtype(share.dtype).itemsize
    gathered = share.length * (devices - 1) / devices * (1 + 1 / size["compression_stride"])
    halos = size["window_size"] - 1 + size["compression_block_size"] - size["compression_stride"]
    one_way = share.batch * token * (gathered + (2 * halos if devices > 1 else 0))
    return one_way if share.mode == "fwd" else 2 * one_way


def predicted_ms(shares: Sequence[ParallelRow]) -> tuple[float, float]:
    """The time of all devices, and that of the messages in it, from some devices' shares of one call."""
    messages_ms = 1e3 * received_bytes(shares[0]) / NVLINK_BYTES_PER_S
    return max(share.median_ms for share in shares) + messages_ms, messages_ms
