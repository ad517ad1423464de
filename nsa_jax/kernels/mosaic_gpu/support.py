"""Whether the Mosaic GPU kernels can run a call, and if not, why. Does not import Pallas."""

import functools
import importlib.metadata

import jax
from packaging.specifiers import SpecifierSet

from nsa_jax.array_typing import Array
from nsa_jax.config import NSAConfig
from nsa_jax.kernels import chip
from nsa_jax.kernels.mosaic_gpu.sizes import DIMS, MOST_HEADS
from nsa_jax.kernels.triton import support as triton

DTYPES = ("bfloat16", "float16")
BLOCKS = (32, 64, 128)
_MOST_SELECTED = 128  # blocks of a query: those of up to 32 queries are sorted in a program's registers
# Query heads of a KV head. With fewer, rows of heads that are padding cost more than is gained where
# neighbours choose alike, as in trained models.
FEWEST_HEADS = 15
# These give the kernels to nvJitLink, which ignores `setmaxnreg`: warpgroups that multiply get no more
# registers than the one that loads, so they spill, and their products wait for one another.
_LINKS = SpecifierSet(">=0.12")
_OPERATIONS = ("selected_attention", "native_sparse_attention")  # those with the selected branch
_USE = "Use implementation='triton'."


def unsupported_reason(
    operation: str,
    *arrays: Array | jax.ShapeDtypeStruct,
    config: NSAConfig | None,
    platform: str,
) -> str | None:
    """Why the kernels cannot run a call; None if they can. See `nsa_jax.dispatch.unsupported_reason`.

    They need what Triton's need, which run beside them. Operations without the selected branch run as
    Triton's.
    """
    reason = triton.unsupported_reason(operation, *arrays, config=config, platform=platform)
    if reason or operation not in _OPERATIONS:
        return reason
    if (capability := chip.capability()) is not None and capability[0] != 9:
        got = ".".join(map(str, capability))
        more = " Their matrix instruction, wgmma, does not exist on Blackwell." if capability[0] > 9 else ""
        return f"the Mosaic GPU kernels need compute capability 9.0 (Hopper), got {got}.{more} {_USE}"
    floats = _of_branch(operation, arrays)
    if wrong := [x.dtype.name for x in floats if x.dtype.name not in DTYPES]:
        return (
            f"the Mosaic GPU kernels support the dtypes {', '.join(DTYPES)}, got {wrong[0]}. Cast the "
            "arrays, or use implementation='triton'."
        )
    if len(floats) == 3:
        query, key, value = floats
        dims = key.shape[-1], value.shape[-1]
        if dims not in DIMS:
            known = ", ".join(f"{h}/{v}" for h, v in DIMS)
            return (
                f"the Mosaic GPU kernels need key and value dims of {known}, got {dims[0]}/{dims[1]}. {_USE}"
            )
        if query.shape[2] > MOST_HEADS * key.shape[2]:
            return (
                f"the Mosaic GPU kernels need at most {MOST_HEADS} query heads of one KV head, got "
                f"{query.shape[2]} / {key.shape[2]}. {_USE}"
            )
    if config is not None:
        if config.selection_block_size not in BLOCKS:
            return (
                f"the Mosaic GPU kernels need a selection_block_size of {', '.join(map(str, BLOCKS))}, got "
                f"{config.selection_block_size}. {_USE}"
            )
        if config.num_selected_blocks > _MOST_SELECTED:
            return (
                f"the Mosaic GPU kernels need a num_selected_blocks of at most {_MOST_SELECTED}, got "
                f"{config.num_selected_blocks}. {_USE}"
            )
    return None


def slower_reason(operation: str, *arrays: Array | jax.ShapeDtypeStruct) -> str | None:
    """Why Triton's kernels are the better choice for a call that both can run; None if these are.

    Args:
      operation, *arrays: as for `unsupported_reason`.
    """
    if operation not in _OPERATIONS:
        return f"the Mosaic GPU kernels serve operations with the selected branch, got {operation}. {_USE}"
    floats = _of_branch(operation, arrays)
    if len(floats) == 3 and floats[0].shape[2] < FEWEST_HEADS * floats[1].shape[2]:
        return (
            f"the Mosaic GPU kernels are no faster with fewer than {FEWEST_HEADS} query heads of a KV head, "
            f"got {floats[0].shape[2]} / {floats[1].shape[2]}. {_USE}"
        )
    if links(jaxlib := _jaxlib()):
        return (
            f"the Mosaic GPU kernels need a jaxlib below 0.12 to be faster, because it keeps their split of "
            f"registers, got {jaxlib}. {_USE}"
        )
    return None


def links(jaxlib: str) -> bool:
    """Whether this version of jaxlib compiles the kernels through nvJitLink, so that they spill registers."""
    return _LINKS.contains(jaxlib, prereleases=True)


@functools.cache
def _jaxlib() -> str:
    return importlib.metadata.version("jaxlib")


def _of_branch(
    operation: str, arrays: tuple[Array | jax.ShapeDtypeStruct, ...]
) -> list[Array | jax.ShapeDtypeStruct]:
    """Queries, keys and values of the selected branch, as far as they are among the arrays."""
    floats = [x for x in arrays if jax.numpy.issubdtype(x.dtype, jax.numpy.floating)]
    if operation == "native_sparse_attention":
        floats = [floats[0], *floats[3:5]] if len(floats) >= 5 else floats[:1]
    return floats[:3]
