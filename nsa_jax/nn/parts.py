"""The parts of a layer that a user may replace: the gate, and the compressors of keys and values."""

import inspect
from collections.abc import Callable, Sequence
from typing import Any

from flax import nnx

from nsa_jax.array_typing import Array, Float, Int
from nsa_jax.config import Branch, NSAConfig
from nsa_jax.layout import token_windows
from nsa_jax.nn.compressor import Compressor
from nsa_jax.nn.gate import check_initial_gates

type GateFunction = Callable[[Float[Array, "B T D"]], Float[Array, "B T N branches"]]
type CompressorFunction = Callable[[Float[Array, "B m l K H"]], Float[Array, "B m K H"]]

type MakeGate = Callable[..., GateFunction]
type MakeCompressor = Callable[..., CompressorFunction]

GATE_CALL = "gate(in_features, num_heads, rngs=rngs)"
COMPRESSOR_CALL = "compressor(head_dim, config, rngs=rngs)"
_REMEDY = "Pass a class like nsa_jax.nn.Gate and nsa_jax.nn.Compressor, or lambda *_, rngs: function"


def make_gate(make: MakeGate, in_features: int, num_heads: int, rngs: nnx.Rngs) -> GateFunction:
    """Makes the gate of a layer. Raises TypeError if the result cannot be called."""
    return _make(GATE_CALL, make, in_features, num_heads, rngs)


def make_compressor(
    make: MakeCompressor, head_dim: int, config: NSAConfig, rngs: nnx.Rngs
) -> CompressorFunction:
    """Makes the compressor of keys, or of values. Raises TypeError if the result cannot be called."""
    return _make(COMPRESSOR_CALL, make, head_dim, config, rngs)


def check_parts(
    gate: MakeGate | None,
    initial_gates: Sequence[float] | None,
    compressor: MakeCompressor | None,
    compression: str,
    share_keys_values: bool,
    branches: tuple[Branch, ...],
) -> None:
    """Raises unless the parts can be made, and contradict neither one another nor the branches.

    Raises:
      TypeError: `gate` or `compressor` cannot be called as `make_gate` and `make_compressor` do.
      ValueError: `compressor` is given together with a `compression` other than the default, or `gate` with
        `initial_gates`; or an option is given that is for branches which are absent.
    """
    alone = len(branches) == 1
    useless = dict(
        gate=alone and gate is not None,
        initial_gates=alone and initial_gates is not None,
        share_keys_values=alone and share_keys_values,
        compressor="cmp" not in branches and compressor is not None,
        compression="cmp" not in branches and compression != "mlp",
    )
    if names := [name for name, is_useless in useless.items() if is_useless]:
        raise ValueError(
            f"options must be for branches that the layer has, got {names[0]} with branches={branches}. "
            "Leave it out, or add the branch."
        )
    check_initial_gates(initial_gates, len(branches))
    if gate is not None:
        _check_make(GATE_CALL, gate)
        if initial_gates is not None:
            raise ValueError(
                f"initial_gates must be left out if a gate is given, got {tuple(initial_gates)}. Leave one "
                "of the two out."
            )
    if compressor is None:
        return
    _check_make(COMPRESSOR_CALL, compressor)
    if compression != "mlp":
        raise ValueError(
            f"compression must be left out if a compressor is given, got compression={compression!r}. Leave "
            "one of the two out."
        )


def compress(compressor: CompressorFunction, blocks: Float[Array, "B m l K H"]) -> Float[Array, "B m K H"]:
    """Calls `compressor` and casts the result to the dtype of `blocks`.

    Raises:
      ValueError: the result is not one vector for each block and KV head.
    """
    compressed = compressor(blocks)
    if compressed.shape != (*blocks.shape[:2], *blocks.shape[3:]):
        raise ValueError(
            f"a compressor must map [B, m, l, K, H] to [B, m, K, H], got {compressed.shape} for "
            f"{blocks.shape}. Make it reduce only axis 2, the tokens of a block."
        )
    return compressed.astype(blocks.dtype)


def compress_rows(
    compressor: CompressorFunction,
    rows: Float[Array, "B S K H"],
    config: NSAConfig,
    segment_ids: Int[Array, "B S"] | None,
) -> Float[Array, "B m K H"]:
    """`compress` of the blocks of whole rows. Only what is packed, or compressed by others, needs windows."""
    if (
        type(compressor) is Compressor
        and _blocks(compressor.config) == _blocks(config)
        and segment_ids is None
    ):
        return compressor.of_rows(rows).astype(rows.dtype)
    return compress(compressor, token_windows(rows, config, segment_ids))


def _blocks(config: NSAConfig) -> tuple[int, int]:
    return config.compression_block_size, config.compression_stride


def weigh(
    gate: GateFunction, x: Float[Array, "B T D"], num_heads: int, branches: tuple[Branch, ...]
) -> Float[Array, "B T N branches"]:
    """Calls `gate`. Raises as `check_weights`."""
    return check_weights(gate(x), x, num_heads, branches)


def check_weights(
    gates: Array, x: Float[Array, "B T D"], num_heads: int, branches: tuple[Branch, ...]
) -> Float[Array, "B T N branches"]:
    """Returns the gates. Raises ValueError unless they are a weight for each token, query head and branch."""
    if gates.shape != (*x.shape[:2], num_heads, len(branches)):
        raise ValueError(
            f"a gate must map [B, T, D] to [B, T, N, {len(branches)}], got {gates.shape} for {x.shape} with "
            f"{num_heads} query heads. Give each head the weights of {' and '.join(branches)}."
        )
    return gates


def _make[Part: Callable[..., Array]](
    call: str, make: Callable[..., Part], size: int, other: int | NSAConfig, rngs: nnx.Rngs
) -> Part:
    _check_make(call, make)
    part = make(size, other, rngs=rngs)
    if not callable(part):
        raise TypeError(f"{call} must make a function or module, got {type(part).__name__}. {_REMEDY}.")
    return part


def _check_make(call: str, make: Callable[..., Any]) -> None:
    try:
        inspect.signature(make).bind(None, None, rngs=None)
    except (TypeError, ValueError):  # not callable, or itself the function of arrays that it should make
        given = getattr(make, "__name__", type(make).__name__)
        raise TypeError(
            f"{call.partition('(')[0]} must be a function to be called as {call}, got {given}. {_REMEDY}."
        ) from None
