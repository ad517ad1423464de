"""Whether the Triton kernels can run a call, and if not, why. Does not import Triton: it may be missing."""

import functools
import importlib
import importlib.metadata
import inspect
from typing import Any

import jax
from packaging.specifiers import SpecifierSet

from nsa_jax.array_typing import Array
from nsa_jax.config import NSAConfig
from nsa_jax.kernels.triton import gpu
from nsa_jax.kernels.triton.decode.sizes import STEP_LIST_BLOCKS, step_list_blocks
from nsa_jax.kernels.triton.dims import padded_heads, splits
from nsa_jax.kernels.triton.sizes import SHARED_BYTES
from nsa_jax.kernels.triton.sizes.selection import chosen_score_rows
from nsa_jax.layout.quantised import LARGEST, is_quantised

OLDEST_CAPABILITY = (8, 0)
OLDEST_FLOAT8 = (8, 9)
DTYPES = ("bfloat16", "float16", "float32")
FLOAT8 = "float8_e4m3fn"
WITHOUT_KERNELS = ("importance_scores",)  # operations that are plain JAX alone
_OF_A_CACHE = ("decode_step", "dense_decode_step", "select_by_index")  # which may be quantised
_OF_AN_INDEX = ("block_scores", "select_by_index")
_MOST_HEADS = 256  # the longest side of a tile that the tensor memory accelerator loads
_MOST_STEP_TOKENS = 8  # new tokens of a row in a decode step
_MOST_STEP_HEADS = 64  # query heads of a KV head in a decode step, which one program holds
_MOST_BLOCK = 128  # tokens of a selection block in a decode step, which are loaded at once
_MOST_INDEX_BLOCK = 256  # tokens of a selection block whose index keys one tile holds
_MOST_SELECTED = 256  # a list of blocks is sorted in the registers of one program
# What a GPU needs: the versions of each package, and why; `nsa_jax.doctor` reads them, too.
VERSIONS = {
    "jax": (">=0.11.1,<0.13", "jax-triton 0.4.1 relies on private parts of JAX, tested up to 0.12"),
    "jax-triton": (">=0.4.1,<0.5", "0.4 launches through the FFI"),
    "triton": (">=3.8,<3.9", "jax-triton lowers no descriptor of 3.7, kernels spill more with 3.9"),
}


def unsupported_reason(
    operation: str, *arrays: Array | jax.ShapeDtypeStruct, config: NSAConfig | None, platform: str
) -> str | None:  # fmt: skip
    """Why the kernels cannot run `operation` on `platform`, or None if they can; see `nsa_jax.dispatch`."""
    if platform != "cuda":
        return f"the Triton kernels need an NVIDIA GPU, got platform {platform}. Use implementation='xla'."
    if operation in WITHOUT_KERNELS:
        return f"the Triton kernels do not have {operation}. Use implementation='xla'."
    if reason := _installation():
        return f"{reason} Install nsa_jax[cuda13], or use implementation='xla'."
    if (found := gpu.capability()) is not None and found < OLDEST_CAPABILITY:
        got = ".".join(map(str, found))
        return (
            f"the Triton kernels need compute capability 8.0 or newer, got {got}. Use implementation='xla'."
        )
    of_a_cache = operation in _OF_A_CACHE
    floats = [
        x
        for x in arrays
        if jax.numpy.issubdtype(x.dtype, jax.numpy.floating) or (of_a_cache and is_quantised(x.dtype))
    ]
    names = {x.dtype.name for x in floats}
    if FLOAT8 in names and found is not None and found < OLDEST_FLOAT8:
        return (
            f"the Triton kernels need compute capability 8.9 or newer for {FLOAT8}, got "
            f"{'.'.join(map(str, found))}. Make a cache in int8, or use implementation='xla'."
        )
    quantised = tuple(LARGEST) if of_a_cache else ()
    if unsupported := sorted(names - {*DTYPES, *quantised}):
        return (
            f"the Triton kernels support the dtypes {', '.join(DTYPES)}, got {unsupported[0]}. "
            "Cast the arrays, or use implementation='xla'."
        )
    if operation == "gated_sum":
        return None
    if operation == "top_blocks":
        return None if config is None else _blocks(operation, config)
    dims = sorted({x.shape[-1] for x in _with_dims(operation, arrays)})
    if unsupported := [dim for dim in dims if not splits(dim)]:
        return (
            "the Triton kernels need key and value dims that are a power of two or the sum of two, of at "
            f"least 16 each and 256 together, got {unsupported[0]}. Pad them, or use implementation='xla'."
        )
    if operation == "dense_decode_step":
        return _step_rows(floats)
    if operation in _OF_AN_INDEX:
        return _index(operation, floats, config, chosen=len(floats) < len(arrays))
    if operation == "decode_step":
        return _step(floats, config, scored=len(floats) == len(arrays))
    if reason := _tiles(operation, floats, config):
        return reason
    return None if config is None else _blocks(operation, config)


def slower_reason(operation: str, *arrays: Array | jax.ShapeDtypeStruct) -> None:
    """None: the kernels are faster than plain JAX wherever they run."""


def _step(floats: list, config: NSAConfig | None, scored: bool) -> str | None:
    """Why the kernels cannot run a decode step (query, keys and values); None if they can.

    The keys are the compressed ones, unless blocks are given beside them: then they are those of the tokens.
    """
    if config is not None:
        block, stride, number = (
            config.selection_block_size, config.compression_stride, config.num_selected_blocks
        )  # fmt: skip
        if block > _MOST_BLOCK or (scored and block > 32 * stride):
            return (
                f"the Triton kernels need a selection_block_size of at most {_MOST_BLOCK} in a decode step, "
                f"and of at most 32 compression strides, got {block} with stride {stride}. Use "
                "implementation='xla'."
            )
        if number > _MOST_SELECTED:
            return (
                f"the Triton kernels need a num_selected_blocks of at most {_MOST_SELECTED}, got {number}. "
                "Use implementation='xla'."
            )
    if len(floats) < 2:
        return None
    if reason := _step_rows(floats):
        return reason
    query, key, *value = floats[:3]
    if key.shape[1] < 1:
        return (
            "the Triton kernels need a cache with room for at least one compression block, got room for 0. "
            "Use a larger max_length, or implementation='xla'."
        )
    if config is not None:
        dim = max(x.shape[-1] for x in (key, *value))
        tile = max(1 << (block - 1).bit_length(), 16) * dim * (6 if query.dtype.itemsize == 4 else 2)
        if tile > SHARED_BYTES[gpu.target()]:
            return (
                "the Triton kernels need the keys of a selection block to fit into shared memory, got "
                f"{block} keys of dim {dim} in {query.dtype.name}. Cast the arrays, or use "
                "implementation='xla'."
            )
        own = config.selection_block_size // config.compression_stride
        blocks, most = -(-key.shape[1] // own), STEP_LIST_BLOCKS[1]
        if scored and step_list_blocks(blocks, 1 << (number - 1).bit_length()) > most:
            return (
                "the Triton kernels rank the selection blocks of a decode step in lists of at most "
                f"{most}, got a cache of {blocks} blocks with num_selected_blocks={number}. Use a smaller "
                "max_length, or implementation='xla'."
            )
    return None


def _step_rows(floats: list) -> str | None:
    """Why a decode step, given as query and keys, has too many query rows; None if it has not."""
    if len(floats) < 2:
        return None
    query, key = floats[:2]
    if query.shape[1] > _MOST_STEP_TOKENS:
        return (
            f"the Triton kernels take at most {_MOST_STEP_TOKENS} tokens in a decode step, got "
            f"{query.shape[1]}. Call prefill, or use implementation='xla'."
        )
    if query.shape[2] > _MOST_STEP_HEADS * key.shape[2]:
        return (
            f"the Triton kernels need at most {_MOST_STEP_HEADS} query heads of one KV head in a decode "
            f"step, got {query.shape[2]} / {key.shape[2]}. Use implementation='xla'."
        )
    return None


def _index(operation: str, floats: list, config: NSAConfig | None, chosen: bool) -> str | None:
    """Why an indexer cannot select, or score blocks, or `chosen` ones (index queries and keys); or None."""
    if config is None:
        return None
    block = config.selection_block_size
    if block > _MOST_INDEX_BLOCK:
        return (
            f"the Triton kernels need a selection_block_size of at most {_MOST_INDEX_BLOCK} for an indexer, "
            f"got {block}. Use implementation='xla'."
        )
    if floats and len(floats[0].shape) == 5:
        query = floats[0]
        columns = max(1 << (block - 1).bit_length(), 32)
        width = 8 if query.dtype.itemsize == 4 else 2  # with the parts of float32 operands
        if (columns + 16) * query.shape[-1] * width > SHARED_BYTES[gpu.target()]:
            return (
                "the Triton kernels need the index keys of a selection block to fit into shared memory, got "
                f"{block} keys of dim {query.shape[-1]} in {query.dtype.name}. Cast the arrays, or use "
                "implementation='xla'."
            )
    if not chosen:
        return None if operation == "block_scores" else _blocks(operation, config)
    if block < 16 or block & (block - 1):
        return (
            "the Triton kernels need a selection_block_size that is a power of two of at least 16 to score "
            f"chosen blocks, got {block}. Use implementation='xla'."
        )
    if floats and not chosen_score_rows(query.dtype.itemsize, query.shape[-1], block, gpu.target()):
        return (
            "the Triton kernels need the index keys of a chosen block to fit into shared memory, got "
            f"{block} keys of dim {query.shape[-1]} in {query.dtype.name}. Cast the arrays, or use "
            "implementation='xla'."
        )
    return None


def _tiles(operation: str, floats: list, config: NSAConfig | None) -> str | None:
    """Why even the smallest tiles do not fit: many heads, wide rows, float32, small GPUs; else None."""
    if len(floats) < 2 or len(floats[0].shape) != 4:
        return None
    query, key, *value = floats[:3]
    if operation == "selected_probabilities":  # its log-sum-exps are those of the keys as values
        value = [key]
    room, width = SHARED_BYTES[gpu.target()], query.dtype.itemsize
    if operation in ("select_blocks", "native_sparse_attention") and config is not None and width == 4:
        strides = config.selection_block_size // config.compression_stride
        columns = 2 * (1 << (strides - 1).bit_length())
        if 2 * (columns + 16) * key.shape[-1] * 4 > room:
            return (
                "the Triton kernels need the compressed keys of two selection blocks to fit into shared "
                f"memory, got {strides} strides a block of dim {key.shape[-1]} in float32. Enlarge the "
                "stride, cast the arrays, or use implementation='xla'."
            )
    if operation == "select_blocks" or (not value and operation != "block_probabilities"):
        return None
    heads = padded_heads(max(query.shape[2] // key.shape[2], 1))
    if heads > _MOST_HEADS:
        return (
            f"the Triton kernels need at most {_MOST_HEADS} query heads of one KV head, got "
            f"{query.shape[2]} / {key.shape[2]}. Use implementation='xla'."
        )
    if operation == "block_probabilities":
        return _probability_tiles(query, key, heads, room)
    dims = key.shape[-1] + value[0].shape[-1]
    if ((max(heads, 16) + 16) * 8 if width == 4 else heads * 4) * dims > room:
        return (
            "the Triton kernels need a token's query heads of one KV head to fit into shared memory, got "
            f"{query.shape[2]} / {key.shape[2]} heads of dims {key.shape[-1]} and {value[0].shape[-1]} in "
            f"{query.dtype.name}. Cast the arrays, or use implementation='xla'."
        )
    return None


def _with_dims(operation: str, arrays: tuple) -> list:
    """The arrays whose last axis is a key or value dim."""
    if operation in _OF_AN_INDEX:
        return list(arrays[:2])
    gates = 7 if operation == "native_sparse_attention" else len(arrays)
    floats = [
        x for i, x in enumerate(arrays) if i != gates and jax.numpy.issubdtype(x.dtype, jax.numpy.floating)
    ]
    return [x for x in floats if len(x.shape) == 4]


def _probability_tiles(query: Any, key: Any, heads: int, room: int) -> str | None:
    """Why a token's query heads of one KV head and 16 keys do not fit into shared memory; None if they do."""
    if (max(heads, 16) + 16) * key.shape[-1] * (6 if query.dtype.itemsize == 4 else 2) <= room:
        return None
    return (
        "the Triton kernels need a token's query heads of one KV head to fit into shared memory, got "
        f"{query.shape[2]} / {key.shape[2]} heads of dim {key.shape[-1]} in {query.dtype.name}. Cast the "
        "arrays, or use implementation='xla'."
    )


def _blocks(operation: str, config: NSAConfig) -> str | None:
    block, stride = config.selection_block_size, config.compression_stride
    number = config.num_selected_blocks
    with_whole_blocks = (
        *("selected_attention", "native_sparse_attention", "block_probabilities", "selected_probabilities"),
    )
    if operation in with_whole_blocks and block not in (16, 32, 64, 128):
        return (
            f"the Triton kernels need a selection_block_size of 16, 32, 64 or 128, got {block}. Choose one "
            "of them, or use implementation='xla'."
        )
    if operation in ("select_blocks", "native_sparse_attention") and block > 32 * stride:
        return (
            "the Triton kernels need at most 32 compression strides in a selection block, got "
            f"{block} / {stride}. Enlarge the stride, or use implementation='xla'."
        )
    unselected = ("compressed_attention", "window_attention", "block_probabilities")
    if operation not in unselected and number > _MOST_SELECTED:
        return (
            f"the Triton kernels need a num_selected_blocks of at most {_MOST_SELECTED}, got {number}. Use "
            "implementation='xla'."
        )
    return None


@functools.cache
def _installation() -> str | None:
    """Why the kernels cannot be lowered here: what is missing, or of a version that does not work."""
    for package, (bounds, why) in VERSIONS.items():
        try:
            found = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            return f"the Triton kernels need {package}, got none installed."
        if not SpecifierSet(bounds).contains(found, prereleases=True):
            return f"the Triton kernels need {package}{bounds} ({why}), got {found}."
    try:
        lowering = importlib.import_module("jax_triton.triton_lib")
        plugin = lowering.triton_kernel_call_lib  # both are private, so they may be missing
        compiler = lowering.cb
    except Exception as error:  # whatever it is, the import fails
        return f"the Triton kernels need jax-triton, got {type(error).__name__} at its import: {error}."
    if plugin is None:
        return "the Triton kernels need jax-cuda13-plugin, got none installed."
    if not inspect.ismodule(compiler):  # jax-triton's stand-in for a compiler that it could not import
        found = importlib.metadata.version("triton")
        return f"the Triton kernels need a Triton that jax-triton can import, got {found}, which it cannot."
    return None
