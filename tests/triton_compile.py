"""Compiles the Triton kernels, and whole programs around them, for NVIDIA GPUs on a machine that has none.

Needs `jax-cuda13-plugin` (its compiler, no GPU) and the environment variables `JAX_PLATFORMS=cpu` and
`JAX_SKIP_CUDA_CONSTRAINTS_CHECK=1`.
"""

import contextlib
import functools
import math
import re
from unittest import mock

import jax
from jax.experimental import topologies
from jax.experimental.pallas import mosaic_gpu as plgpu
from jax.sharding import AbstractDevice, AbstractMesh, NamedSharding, PartitionSpec

DEVICE_KINDS = {
    80: "NVIDIA A100-SXM4-80GB",
    89: "NVIDIA L4",
    90: "NVIDIA H100 80GB HBM3",
    100: "NVIDIA B200",
    120: "NVIDIA RTX PRO 6000 Blackwell",
}
# XLA optimises the program as always, but its own kernels, at which no test looks, just so far that NVIDIA's
# assembler is soon done with them: at 0, which the tests of a CPU ask for, it takes twice as long. Nor does
# it try tiles of products, of which it would compile each: the program differs in nothing else.
FAST_TO_COMPILE = {"xla_backend_optimization_level": 1, "xla_gpu_autotune_level": 0}
SHARED_MEMORY_BYTES = {80: 163 * 1024, 89: 99 * 1024, 90: 227 * 1024, 100: 227 * 1024, 120: 99 * 1024}
H100 = """
gpu_device_info {
  threads_per_block_limit: 1024 threads_per_warp: 32 threads_per_core_limit: 2048
  shared_memory_per_block: 49152 shared_memory_per_core: 233472 shared_memory_per_block_optin: 232448
  registers_per_core_limit: 65536 registers_per_block_limit: 65536 core_count: 132 fpus_per_core: 128
  block_dim_limit_x: 2147483647 block_dim_limit_y: 65535 block_dim_limit_z: 65535
  memory_bandwidth: 3352320000000 l2_cache_size: 52428800 clock_rate_ghz: 1.98
  device_memory_size: 84942979072
  cuda_compute_capability { major: 9 feature_extension: ACCELERATED_FEATURES }
}
platform_name: "CUDA"
dnn_version_info { major: 9 minor: 10 patch: 0 }
device_description_str: "NVIDIA H100 80GB HBM3"
"""


def device(capability: int, num_cores: int = 132):
    """Context in which JAX lowers for a GPU of this compute capability, times 10."""
    abstract = AbstractDevice(device_kind=DEVICE_KINDS[capability], num_cores=num_cores, platform="gpu")
    return jax.sharding.use_abstract_mesh(AbstractMesh((), (), abstract_device=abstract))


def lower(function, *arguments, capability: int = 90, num_cores: int = 132):
    """The program of `function`, lowered for CUDA; Triton kernels are compiled to PTX on the way."""
    with device(capability, num_cores):
        return jax.jit(function).trace(*arguments).lower(lowering_platforms=("cuda",))


@contextlib.contextmanager
def without_code_of_kernels():
    """Context in which kernels stand in a program as always, but without code: for tests of the rest.

    Most of the time of lowering such a program goes into that code. What is lowered here is forgotten.
    """
    import triton_kernels
    from jax_triton import triton_lib

    some_type = next(iter(triton_lib._TMA_DTYPE_DEVICE_TO_HOST))

    def compile_nothing(function, spec, target, backend, options):
        types = " ".join(map(str, jax.tree.leaves(spec.signature)))
        blocks = [tuple(map(int, x.split(","))) for x in re.findall(r"tensordesc<\w+\[([\d, ]+)\]", types)]
        metadata = [
            dict(block_size=block, elem_size=2, elem_type=some_type, fp4_padded=False,
                 is_im2col=False, swizzle=0)
            for block in blocks
        ]  # fmt: skip
        code = f".version 8.0\n.target sm_{target.arch}\n.address_size 64\n.entry left_out() {{ ret; }}\n"
        result = triton_lib.CompilationResult(code, "left_out", 0, "", "", tensordesc_meta=metadata)
        kernel = triton_lib.triton_kernel_call_lib.TritonKernel(
            result.name, options["num_warps"], options["num_ctas"], 0, code, "", target.arch
        )
        return kernel, "", options, result

    with (
        triton_kernels.kernels_forgotten(),
        mock.patch.object(triton_lib.TritonFunction, "_compile_kernel", compile_nothing),
    ):
        yield


def empty_kernel(body, *, make=plgpu.kernel, **options):
    """`plgpu.kernel` of Mosaic, for a kernel of the same arrays that does nothing."""

    def nothing(*_, **__):
        pass

    nothing.__name__ = body.__name__
    return make(nothing, **options)


def traced(function, *arguments, capability: int = 90) -> str:
    """The traced program with the names of its scopes: it holds the calls of kernels, and compiles none."""
    with device(capability):
        return jax.jit(function).trace(*arguments).jaxpr.pretty_print(name_stack=True)


def compile_for_h100(function, *arguments, code_of_kernels: bool = False, **options):
    """The executable of `function` for an H100, from `jax.ShapeDtypeStruct`s and options of XLA.

    Without `code_of_kernels`, Triton kernels stand in it without code, see `without_code_of_kernels`.
    """
    mesh = mesh_of_h100s(x=1)
    whole = NamedSharding(mesh, PartitionSpec())
    arguments = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=whole), arguments)
    context = contextlib.nullcontext() if code_of_kernels else without_code_of_kernels()
    with context, jax.sharding.use_abstract_mesh(mesh.abstract_mesh):
        lowered = jax.jit(function).lower(*arguments)
    return lowered.compile(compiler_options=FAST_TO_COMPILE | options)


def compile_on(mesh, function, *arguments, **options):
    """The executable of `function` for all GPUs of `mesh_of_h100s`; options are those of `jax.jit`.

    Kernels stand in it without code. The arguments are `jax.ShapeDtypeStruct`s with their shardings.
    """
    # XLA asks for kernels while it compiles, and these for the kind of device.
    with without_code_of_kernels(), mock.patch.object(plgpu, "kernel", empty_kernel), jax.set_mesh(mesh):
        return jax.jit(function, **options).lower(*arguments).compile(compiler_options=FAST_TO_COMPILE)


@functools.cache
def mesh_of_h100s(**axes):
    """A mesh of H100s that are not there, by the sizes of its axes."""
    topology = topologies.get_topology_desc(
        platform="cuda", target_config=H100, topology=f"1x1x{math.prod(axes.values())}"
    )
    return topologies.make_mesh(topology, tuple(axes.values()), tuple(axes))


def compile_for_two(function, arrays):
    """The executable of a function for two H100s that divide heads, axis 2 of all arrays and of the result.

    It runs twice, on arrays of its own: as `jit` divides it, and in a `shard_map`. What is alike in both is
    compiled once.
    """
    mesh = mesh_of_h100s(x=2)
    heads = NamedSharding(mesh, PartitionSpec(None, None, "x"))
    arrays = [jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=heads) for x in arrays]
    in_shards = jax.shard_map(function, mesh=mesh, in_specs=(heads.spec,) * len(arrays), out_specs=heads.spec)

    def both(arrays, others):
        return function(*arrays), in_shards(*others)

    return compile_on(mesh, both, arrays, arrays)
