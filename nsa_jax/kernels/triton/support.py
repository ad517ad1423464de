"""What the Triton kernels can run, and why not, without importing Triton: that may be missing."""

import functools
import importlib
import importlib.metadata
import inspect

import jax

from nsa_jax.array_typing import Array
from nsa_jax.config import NSAConfig

OLDEST_CAPABILITY = (8, 0)
DTYPES = ("bfloat16", "float16", "float32")
_MOST_SELECTED = 256  # a list of blocks is sorted in the registers of one program
_VERSIONS = {
    "jax": ((0, 11, 1), (0, 12), "jax-triton 0.4.1 does not lower on JAX 0.12"),
    "jax-triton": ((0, 4, 1), (0, 5), "0.4 launches through the FFI"),
    "triton": ((3, 6), (3, 9), "3.6 has host descriptors, 3.9 emits PTX that CUDA 13.0 refuses"),
}


def unsupported_reason(
    operation: str, *arrays: Array | jax.ShapeDtypeStruct, config: NSAConfig | None, platform: str
) -> str | None:
    """Why the kernels cannot run `operation` on `platform`, or None if they can; see `nsa_jax.dispatch`."""
    if platform != "cuda":
        return f"the Triton kernels need an NVIDIA GPU, got platform {platform}. Use implementation='xla'."
    if reason := _installation():
        return f"{reason} Install nsa_jax[cuda13], or use implementation='xla'."
    if (found := capability()) is not None and found < OLDEST_CAPABILITY:
        got = ".".join(map(str, found))
        return f"the Triton kernels need compute capability 8.0, got {got}. Use implementation='xla'."
    floats = [x for x in arrays if jax.numpy.issubdtype(x.dtype, jax.numpy.floating)]
    if unsupported := [x.dtype.name for x in floats if x.dtype.name not in DTYPES]:
        return (
            f"the Triton kernels run {', '.join(DTYPES)}, got {unsupported[0]}. "
            "Cast, or use implementation='xla'."
        )
    if operation == "gated_sum":
        return None
    dims = sorted({x.shape[-1] for x in floats if len(x.shape) == 4 and x is not _gates(operation, arrays)})
    if unsupported := [dim for dim in dims if not _splits(dim)]:
        return (
            "the Triton kernels need key and value dims that are a power of two or the sum of two, of at "
            f"least 16 each and 256 together, got {unsupported[0]}. Pad them, or use implementation='xla'."
        )
    return None if config is None else _blocks(operation, config)


def split_dim(dim: int) -> tuple[int, int]:
    """`(first, second)`: powers of two of at least 16 that add up to `dim`, the second maybe 0.

    Raises:
      ValueError: there are none, or `dim` is above 256.
    """
    first = 1 << (dim.bit_length() - 1) if dim > 0 else 0
    second = dim - first
    if first < 16 or dim > 256 or (second and (second < 16 or second & (second - 1))):
        raise ValueError(f"dim must be a power of two or the sum of two, 16 to 256, got {dim}. Pad it.")
    return first, second


def _splits(dim: int) -> bool:
    try:
        split_dim(dim)
    except ValueError:
        return False
    return True


def _gates(operation: str, arrays: tuple) -> object:
    return arrays[7] if operation == "native_sparse_attention" and len(arrays) > 7 else None


def _blocks(operation: str, config: NSAConfig) -> str | None:
    block, stride, number = (
        config.selection_block_size,
        config.compression_stride,
        config.num_selected_blocks,
    )
    if operation in ("selected_attention", "native_sparse_attention") and block not in (16, 32, 64, 128):
        return (
            f"the Triton kernels need a selection_block_size of 16, 32, 64 or 128, got {block}. Choose one "
            "of them, or use implementation='xla'."
        )
    if operation in ("select_blocks", "native_sparse_attention") and block > 32 * stride:
        return (
            "the Triton kernels need at most 32 compression strides in a selection block, got "
            f"{block} / {stride}. Enlarge the stride, or use implementation='xla'."
        )
    if operation not in ("compressed_attention", "window_attention") and number > _MOST_SELECTED:
        return (
            f"the Triton kernels need a num_selected_blocks of at most {_MOST_SELECTED}, got {number}. Use "
            "implementation='xla'."
        )
    return None


@functools.cache
def _installation() -> str | None:
    """Why the kernels cannot be lowered here: what is missing, or of a version that does not work."""
    for package, (oldest, newest, why) in _VERSIONS.items():
        try:
            found = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            return f"the Triton kernels need {package}, got no such package."
        numbers = tuple(int(part) for part in found.split(".")[:3] if part.isdigit())
        if not oldest <= numbers < newest:
            bounds = f">={'.'.join(map(str, oldest))},<{'.'.join(map(str, newest))}"
            return f"the Triton kernels need {package}{bounds} ({why}), got {found}."
    try:
        lowering = importlib.import_module("jax_triton.triton_lib")
    except Exception as error:  # whatever stops the import is the reason
        return f"the Triton kernels need jax-triton, got {type(error).__name__} at its import: {error}."
    if lowering.triton_kernel_call_lib is None:
        return "the Triton kernels need jax-cuda13-plugin, got a jaxlib without it."
    if not inspect.ismodule(lowering.cb):  # it stands in for a compiler that it could not import
        found = importlib.metadata.version("triton")
        return f"the Triton kernels need a Triton that jax-triton compiles with (3.7 and newer), got {found}."
    return None


def capability() -> tuple[int, int] | None:
    """Compute capability of the GPU that a program is made for, None where none is known."""
    abstract = jax.sharding.get_abstract_mesh().abstract_device
    if jax.default_backend() == "gpu":
        major, minor = jax.local_devices()[0].compute_capability.split(".")
        return int(major), int(minor)
    if abstract is None or abstract.platform != "gpu":
        return None
    # jax-triton knows what it compiles for where JAX has no GPU but lowers for one.
    info = importlib.import_module("jax_triton.triton_lib").gpu_info
    return divmod(info.get_gpu_info().compute_capability, 10)


def target() -> int:
    """The kind of GPU whose tile sizes fit: 80 (A100), 89 (consumer cards, less memory) or 90 (Hopper)."""
    found = capability() or (9, 0)
    if (9, 0) <= found < (12, 0):
        return 90
    return 80 if found == (8, 0) else 89
