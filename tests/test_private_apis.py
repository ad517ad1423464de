"""What the project uses of other packages that may change without notice: private, experimental or young.

When a new version of such a package breaks something, read the list first. Any other name that matches
`may_change` fails here until it is listed with a reason or replaced by something public.
"""

import ast
import importlib
import pathlib
from collections.abc import Iterator, Mapping

import jax
import pytest
from flax import nnx

ROOT = pathlib.Path(__file__).resolve().parent.parent
FOLDERS = ("nsa_jax", "nsa_torch_ref", "parity", "benchmarks", "examples", "tests")
OTHERS = ("jax", "jaxlib", "flax", "orbax", "optax", "jax_triton", "triton")
# Packages and names in which anything may change, or which are too young to be relied upon.
UNSTABLE = (
    *("jax.experimental", "jax.extend", "jax.interpreters", "jax.ad_checkpoint", "jax.core", "jax.ffi"),
    *("jax.make_user_context", "jax.sharding.get_abstract_mesh", "jax.sharding.get_mesh", "jax.set_mesh"),
    *("jax.enable_x64", "jax.P", "jaxlib", "jax_triton", "orbax"),
    *("flax.nnx.nn", "flax.nnx.to_flat_state", "flax.nnx.split_rngs", "flax.nnx.scan", "flax.nnx.List"),
    "flax.nnx.to_pure_dict",
)

TRITON, KERNELS = "nsa_jax/kernels/triton", ("nsa_jax/kernels/triton", "tests")
DEAD_LAUNCHES = ("nsa_jax/kernels/triton/dead_launches.py",)
LAUNCH, MOSAIC = "nsa_jax/kernels/triton/launch.py", ("nsa_jax/kernels/mosaic_gpu",)
PARTITION, DIVIDES = ("nsa_jax/sharding/auto.py",), "lets XLA divide kernels; nothing public does"
FORMS = ("nsa_jax/kernels/mosaic_gpu/unstable.py",)
IN_KERNELS = "the language that the Mosaic GPU kernels are written in"
PRIMITIVES = "two private primitives; `unstable.Form.PUBLIC` is the fallback"
PALLAS = (
    *("ACC", "Barrier", "RefUnion", "SMEM", "barrier_arrive", "barrier_wait", "broadcasted_iota"),
    *("commit_smem", "commit_smem_to_gmem_group", "copy_gmem_to_smem", "copy_smem_to_gmem", "layout_cast"),
    *("load", "set_max_registers", "wait_smem_to_gmem", "wgmma", "wgmma_accumulator_load"),
    *(
        "CompilerParams",
        "Layout.WGMMA",
        "Layout.WGMMA.reduce",
        "SwizzleTransform",
        "TilingTransform",
        "kernel",
    ),
)
INTERPRETER = "jax._src.pallas.mosaic_gpu.interpret.gpu_callbacks"
SAVES, READS = ("nsa_jax/model/checkpoint.py",), ("nsa_jax/model/checkpoint_reader.py",)
FOLDER, SUMS = "nsa_jax/model/checkpoint_folder.py", ("nsa_jax/model/checksums.py",)
# name: (where it is used, why)
USED = {
    "jax.experimental.pallas": (MOSAIC, IN_KERNELS),
    **{
        f"jax.experimental.pallas.{x}": (MOSAIC, IN_KERNELS)
        for x in ("ds", "multiple_of", "run_scoped", "run_state", "when")
    },
    "jax.experimental.pallas.mosaic_gpu": ((*MOSAIC, "tests"), IN_KERNELS),
    **{f"jax.experimental.pallas.mosaic_gpu.{x}": (MOSAIC, IN_KERNELS) for x in PALLAS},
    "jax.experimental.pallas.mosaic_gpu.InterpretGPUParams": (("tests",), "the kernels without a GPU"),
    INTERPRETER: (("tests",), "whether the interpreter found a race"),
    f"{INTERPRETER}.get_races": (("tests",), "whether the interpreter found a race"),
    "jax.experimental.mosaic.gpu": (FORMS, PRIMITIVES),
    "jax.experimental.mosaic.gpu.LoweringSemantics.Warpgroup": (FORMS, PRIMITIVES),
    "jax._src.core": (FORMS, PRIMITIVES),
    "jax._src.core.Primitive": (FORMS, PRIMITIVES),
    "jax._src.pallas.mosaic_gpu.core": (FORMS, PRIMITIVES),
    "jax._src.pallas.mosaic_gpu.core._memory_effect": (FORMS, PRIMITIVES),
    "jax._src.pallas.mosaic_gpu.lowering": (FORMS, PRIMITIVES),
    "jax._src.pallas.mosaic_gpu.lowering._ensure_ir_value": (FORMS, PRIMITIVES),
    "jax._src.pallas.mosaic_gpu.lowering.register_lowering_rule": (FORMS, PRIMITIVES),
    "jax._src.pallas.mosaic_gpu.primitives": (FORMS, PRIMITIVES),
    "jax._src.pallas.mosaic_gpu.primitives._get_barrier_base_index": (FORMS, PRIMITIVES),
    "jax._src.state.primitives": (FORMS, PRIMITIVES),
    "jax._src.state.primitives.get_ref_and_transforms": (FORMS, PRIMITIVES),
    "jax._src.tree_util": (FORMS, PRIMITIVES),
    "jax._src.tree_util.tree_flatten": (FORMS, PRIMITIVES),
    **{
        f"jax.experimental.custom_partitioning.{x}": (PARTITION, DIVIDES)
        for x in ("ArrayMapping", "CompoundFactor", "SdyShardingRule", "custom_partitioning")
    },
    "jax._src.sharding_impls.parse_flatten_op_sharding": (
        PARTITION,
        "which axes an array is sharded over: inside of shard_map, `custom_partitioning` does not say",
    ),
    "jax.interpreters.partial_eval": (DEAD_LAUNCHES, "where jax-triton's rule for dead code is kept"),
    "jax.interpreters.partial_eval.dce_rules.get": (DEAD_LAUNCHES, "as above"),
    "jax.interpreters.partial_eval.dce_rules": ((*DEAD_LAUNCHES, "tests"), "as above"),
    "jax.interpreters.mlir": (PARTITION, "makes each program of `custom_partitioning` unlike all others"),
    "jax.interpreters.mlir.ir_constant": (PARTITION, "as above"),
    "jax.experimental.checkify": (
        ("nsa_jax/debug.py", "nsa_jax/parallel/declared.py", "tests"),
        "value checks under jit; has no other home",
    ),
    "jax.experimental.checkify.check": (("nsa_jax/debug.py",), "value checks under jit"),
    "jax.experimental.checkify.debug_check": (
        ("nsa_jax/parallel/declared.py",),
        "value checks that do nothing outside of checkify",
    ),
    "jax.experimental.checkify.checkify": (("tests",), "value checks under jit"),
    "jax.experimental.checkify.JaxRuntimeError": (("tests",), "value checks under jit"),
    "jax.experimental.topologies": (("tests",), "compiles for a GPU that is not there"),
    "jax.experimental.topologies.get_topology_desc": (("tests",), "compiles for a GPU that is not there"),
    "jax.experimental.topologies.make_mesh": (("tests",), "compiles for a GPU that is not there"),
    "jax.extend.core": (("tests",), "the equations inside a jaxpr"),
    "jax.extend.core.jaxprs_in_params": (("tests",), "the equations inside a jaxpr"),
    "jax.ad_checkpoint": (("tests",), "what a remat policy stores"),
    "jax.ad_checkpoint.checkpoint_name": ((TRITON,), "names what the forward saves, for remat policies"),
    "jax.ad_checkpoint.print_saved_residuals": (("tests",), "what a remat policy stores"),
    "jax.core.Tracer": (("nsa_jax", "tests"), "whether values are known: checked where they are"),
    "jax.make_user_context": (("nsa_jax/dispatch.py",), "use_implementation reaches what is traced already"),
    "jax.sharding.get_abstract_mesh": (("nsa_jax", "tests"), "the platform of a program, and its mesh"),
    "jax.sharding.get_mesh": (
        ("nsa_jax/nn", "examples/train_lm", "benchmarks/devices.py"),
        "where abstract parameters are to lie",
    ),
    "jax.set_mesh": (
        ("tests", "examples/train_lm", "benchmarks/devices.py"),
        "the mesh in context, which flax wants for sharded parameters",
    ),
    "jax.enable_x64": (
        ("nsa_jax/doctor", "benchmarks", "tests"),
        "float64 in one block; younger than the global switch",
    ),
    "jax.P": (("tests",), "the short name of PartitionSpec"),
    "jaxlib": (("benchmarks", "tests"), "its version"),
    "jaxlib.__version__": (("benchmarks", "tests"), "its version"),
    "jax_triton": ((LAUNCH, TRITON, "tests"), "the module itself"),
    "jax_triton.triton_call": ((LAUNCH,), "launches the kernels; `input_output_aliases` is deprecated"),
    "jax_triton.TensorDescriptor": ((TRITON,), "host-side TMA descriptors"),
    "jax_triton.TensorDescriptor.from_array": ((TRITON,), "host-side TMA descriptors"),
    "jax_triton.triton_lib": ((*KERNELS, *DEAD_LAUNCHES), "whether it could import its compiler"),
    "jax_triton.triton_lib.gpu_info": (("nsa_jax/kernels/chip.py",), "what it compiles for"),
    "jax_triton.triton_lib.triton_kernel_call_p": ((*DEAD_LAUNCHES, "tests"), "the primitive of a launch"),
    "jax_triton.triton_lib.CompilationResult": (("tests",), "registers and memory of the compiled kernels"),
    "jax_triton.triton_lib.compile_ttir_to_ptx_inplace": (("tests",), "registers and memory of the kernels"),
    "triton.runtime.interpreter._LangPatchScope": (("tests",), "runs kernels without a GPU"),
    "triton.runtime.interpreter._implicit_cvt": (("tests",), "runs kernels without a GPU"),
    "triton.runtime.interpreter._patch_lang": (("tests",), "runs kernels without a GPU"),
    "orbax.checkpoint": (
        (*SAVES, *READS, FOLDER, "examples", "tests"),
        "checkpoints: its API is being replaced by a new one",
    ),
    **{
        f"orbax.checkpoint.{name}": (SAVES, "saves checkpoints")
        for name in ("CheckpointManager", "CheckpointManagerOptions", "args.JsonSave", "args.StandardSave")
    },
    **{
        f"orbax.checkpoint.{name}": (READS, "reads checkpoints")
        for name in (
            *("Checkpointer", "CompositeCheckpointHandler", "StandardCheckpointHandler"),
            *("args.JsonRestore", "args.StandardRestore"),
        )
    },
    "orbax.checkpoint.args.Composite": ((*SAVES, *READS), "checkpoints"),
    "orbax.checkpoint.JsonCheckpointHandler": ((*READS, "tests"), "reads checkpoints"),
    "orbax.checkpoint.utils.checkpoint_steps": ((FOLDER,), "the newest step without opening a manager"),
    "jax.experimental.multihost_utils": (SUMS, "adds up sums of several processes"),
    "jax.experimental.multihost_utils.process_allgather": (
        SUMS,
        "adds up the checksums of several processes",
    ),
    "flax.nnx.nn.dtypes.promote_dtype": (("nsa_jax/nn",), "promotes as nnx.Linear does"),
    "flax.nnx.to_flat_state": (("nsa_jax/nn", "tests"), "parameters by path"),
    "flax.nnx.to_pure_dict": (("tests",), "gradients as a tree"),
    "flax.nnx.List": (("nsa_jax/model", "tests"), "lists of modules must be declared since flax 0.12"),
    "flax.nnx.scan": (("examples",), "a stack of layers"),
    "flax.nnx.split_rngs": (("examples",), "other parameters in each layer of a stack"),
}
# Used through a variable, so that no name in the source says so.
THROUGH_VARIABLES = {
    "jax.stages.Compiled.memory_analysis": "peak memory, in benchmarks and tests",
    "orbax.checkpoint.JsonCheckpointHandler.async_save": "tests: a disk that is full",
    "jax._src.sharding_impls.GSPMDSharding": "nsa_jax.sharding.auto: its attribute `_hlo_sharding`",
    "jax_triton.triton_lib.cb": "nsa_jax.kernels.triton.support: whether a compiler is there",
    "jax_triton.triton_lib.triton_kernel_call_lib": "nsa_jax.kernels.triton.support: whether the plugin is",
    "jax_triton.triton_lib.gpu_info.get_gpu_info": "nsa_jax.kernels.chip: what it compiles for",
}


def may_change(name: str) -> bool:
    private = any(part.startswith("_") and not part.endswith("__") for part in name.split("."))
    return private or any(name == part or name.startswith(part + ".") for part in UNSTABLE)


def names(source: str) -> Iterator[str]:
    """Dotted names of other packages that a file imports or reads, the longest of each expression."""
    tree = ast.parse(source)
    known: dict[str, str] = {}
    for node in ast.walk(tree):
        match node:
            case ast.Import(names=aliases):
                for alias in aliases:
                    root = alias.name.partition(".")[0]
                    known[alias.asname or root] = alias.name if alias.asname else root
                    yield alias.name
            case ast.ImportFrom(module=str(module), names=aliases, level=0):
                for alias in aliases:
                    known[alias.asname or alias.name] = f"{module}.{alias.name}"
                    yield f"{module}.{alias.name}"
    inner = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Attribute)}
    for node in ast.walk(tree):
        whole = id(node) not in inner and isinstance(node, ast.Attribute | ast.Name | ast.Call)
        if whole and (name := dotted(node, known)):
            yield name


def dotted(node: ast.expr, known: Mapping[str, str]) -> str | None:
    match node:
        case ast.Name(id=name):
            return known.get(name)
        case ast.Attribute(value=value, attr=attribute):
            before = dotted(value, known)
            return before and f"{before}.{attribute}"
        case ast.Call(func=ast.Attribute(attr=function), args=[ast.Constant(value=str(name)), *_]):
            return name if function in ("import_module", "importorskip") else None
    return None


def changeable(source: str) -> set[str]:
    found = set()
    for name in names(source):
        if name.startswith("orbax.") and not name.startswith("orbax.checkpoint"):
            name = name.replace("orbax.", "orbax.checkpoint.", 1)  # the module as a variable
        if name != "orbax" and name.partition(".")[0] in OTHERS and may_change(name):
            found.add(name)
    return found


def uses() -> dict[str, set[str]]:
    """Files by the names that they use."""
    found: dict[str, set[str]] = {}
    for path in sorted(path for folder in FOLDERS for path in (ROOT / folder).rglob("*.py")):
        for name in changeable(path.read_text(encoding="utf-8")):
            found.setdefault(name, set()).add(path.relative_to(ROOT).as_posix())
    return found


def test_all_uses_are_listed_and_all_that_is_listed_is_used():
    found = uses()

    assert found.keys() - USED.keys() == set(), "list them with a reason, or use something public"
    assert USED.keys() - found.keys() == set(), "no longer used"
    for name, (places, _) in USED.items():
        outside = {file for file in found[name] if not file.startswith(places)}
        assert outside == set(), name
        unused = {place for place in places if not any(file.startswith(place) for file in found[name])}
        assert unused == set(), name


@pytest.mark.parametrize("name", [*USED, *THROUGH_VARIABLES])
def test_the_installed_versions_have_it(name):
    package = name.partition(".")[0]
    if package in ("jax_triton", "triton", "orbax"):
        pytest.importorskip(package, reason=f"{package} is in an extra", exc_type=ImportError)

    assert exists(name)


def exists(name: str) -> bool:
    parts = name.split(".")
    for number in range(len(parts), 0, -1):
        try:
            found = importlib.import_module(".".join(parts[:number]))
        except ImportError:
            continue
        for part in parts[number:]:
            if not hasattr(found, part):
                return False
            found = getattr(found, part)
        return True
    return False


def test_instances_have_what_is_read_of_them():
    linear = nnx.eval_shape(lambda: nnx.Linear(1, 1, rngs=nnx.Rngs(0)))

    # nsa_jax.dispatch and nsa_jax.kernels.chip: the platform that a program is lowered for.
    assert hasattr(jax.sharding.get_abstract_mesh(), "abstract_device")
    # nsa_jax.model.restorable leaves out flax's own attributes when it compares the settings of modules.
    own = {name for name in vars(linear) if name.startswith("_")}
    assert own
    assert all(name.startswith("_pytree") for name in own)


@pytest.mark.parametrize(
    ("source", "name"),
    [
        ("from jax._src import core", "jax._src.core"),
        ("import jax._src.core as c\nc.Tracer", "jax._src.core.Tracer"),
        ("import jax\njax._src.core.Tracer()", "jax._src.core.Tracer"),
        ("def f():\n  from jax.experimental import pallas as pl\n  pl.Ref", "jax.experimental.pallas.Ref"),
        ("from flax import nnx\nnnx.nn.linear._canonical(1)", "flax.nnx.nn.linear._canonical"),
        ("from flax import nnx\nclass A(nnx.List): pass", "flax.nnx.List"),
        ("import importlib\nimportlib.import_module('jax_triton.x').y", "jax_triton.x.y"),
        ("orbax = f()\nimport orbax.checkpoint\norbax.utils.x()", "orbax.checkpoint.utils.x"),
    ],
)
def test_what_may_change_is_found(source, name):
    assert name in changeable(source)


@pytest.mark.parametrize(
    "source",
    [
        "import jax\njax.jit(f)._x",
        "self._x",
        "import numpy._core",
        "from nsa_jax import _x",
        "jax = 1\njax._src",
    ],
)
def test_what_is_ours_or_public_is_not_found(source):
    assert changeable(source) == set()


def test_a_missing_name_is_seen():
    assert not exists("jax.experimental.no_such_thing")
    assert not exists("jax.stages.Compiled.no_such_thing")
