"""What the project uses of other packages that may change without notice: private, experimental or young.

When a new version of such a package breaks something, read the list first. Any other name that matches
`may_change` fails here until it is listed with a reason or replaced by something public.
"""

import ast
import functools
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

TRITON, LAUNCH, CHIP = "nsa_jax/kernels/triton", "nsa_jax/kernels/triton/launch.py", "nsa_jax/kernels/chip.py"
KEPT = "nsa_jax/kernels/triton/kernel_cache.py"
DEAD, PARTITION = "nsa_jax/kernels/triton/dead_launches.py", "nsa_jax/sharding/auto.py"
MOSAIC, ELSEWHERE = "nsa_jax/kernels/mosaic_gpu", "nsa_jax/traced_elsewhere.py"
FORMS = f"{MOSAIC}/unstable.py"
INTERPRETER = "jax._src.pallas.mosaic_gpu.interpret"
PRIMITIVES = "two private primitives; `unstable.Form.PUBLIC` is the fallback"
SAVES, READS = "nsa_jax/model/checkpoint.py", "nsa_jax/model/checkpoint_reader.py"
FOLDER, SUMS = "nsa_jax/model/checkpoint_folder.py", "nsa_jax/model/checksums.py"
ADOPT = "nsa_jax/adopt"
MESH = "examples/train_lm", "benchmarks/devices.py", f"{ADOPT}/mesh.py"
CHECKS = "nsa_jax/debug.py", "nsa_jax/parallel/declared.py"
# A name, or what its name begins with: why it is used, and where. Of several the longest counts.
USED = {
    "jax.experimental.pallas": ("the language of the Mosaic GPU kernels", MOSAIC, "tests"),
    INTERPRETER: ("whether the interpreter found a race, and what products read", "tests"),
    "jax.experimental.mosaic.gpu": (PRIMITIVES, FORMS),
    "jax._src.core": (PRIMITIVES, FORMS),
    "jax._src.pallas.mosaic_gpu": (PRIMITIVES, FORMS),
    "jax._src.state.primitives": (PRIMITIVES, FORMS),
    "jax._src.tree_util": (PRIMITIVES, FORMS),
    "jax.experimental.custom_partitioning": ("lets XLA divide kernels; nothing public does", PARTITION),
    "jax._src.sharding_impls.parse_flatten_op_sharding": (
        "which axes an array is sharded over: inside of shard_map, `custom_partitioning` does not say",
        PARTITION,
    ),
    "jax.interpreters.partial_eval": ("where jax-triton's rule for dead code is kept", DEAD, "tests"),
    "jax.interpreters": ("rules of a primitive that speaks when it is lowered for a GPU", ELSEWHERE),
    "jax.interpreters.mlir": (
        "makes each program of `custom_partitioning` unlike all others; the same primitive",
        PARTITION,
        ELSEWHERE,
    ),
    "jax.experimental.checkify": ("value checks under jit; has no other home", *CHECKS, "tests"),
    "jax.experimental.topologies": ("compiles for a GPU that is not there", "tests"),
    "jax.extend.core": ("the equations inside a jaxpr", "tests"),
    "jax.extend.core.Primitive": ("speaks when it is lowered for a GPU", ELSEWHERE),
    "jax.ad_checkpoint": ("what a remat policy stores", "tests"),
    "jax.ad_checkpoint.checkpoint_name": (
        "names what the forward saves, for remat policies",
        TRITON,
        "nsa_jax/nn/distillation.py",
    ),
    "jax.core.Tracer": ("whether values are known: checked where they are", "nsa_jax", "tests"),
    "jax.make_user_context": ("use_implementation reaches what is traced already", "nsa_jax/dispatch.py"),
    "jax.sharding.get_abstract_mesh": ("the platform of a program, and its mesh", "nsa_jax", "tests"),
    "jax.sharding.get_mesh": ("where abstract parameters are to lie", "nsa_jax/nn", "nsa_jax/model", *MESH),
    "jax.set_mesh": ("the mesh in context, which flax wants for sharded parameters", "tests", *MESH),
    "jax.enable_x64": ("float64 in one block", "nsa_jax/doctor", "benchmarks", "tests"),
    "jax.P": ("the short name of PartitionSpec", "tests"),
    "jaxlib": ("its version", "benchmarks", "tests"),
    "jax_triton": ("the module itself", LAUNCH, TRITON, "tests"),
    "jax_triton.triton_call": ("launches the kernels; `input_output_aliases` is deprecated", LAUNCH, "tests"),
    "jax_triton.TensorDescriptor": ("host-side TMA descriptors", TRITON),
    "jax_triton.triton_lib": (
        "its compiler, which launch wraps, and what it made",
        TRITON,
        "tests",
        DEAD,
    ),
    "triton._C.libtriton": ("which environment variables change a kernel, as Triton's cache asks", KEPT),
    "jax_triton.triton_lib.gpu_info": ("what it compiles for", CHIP),
    "triton.runtime.interpreter": ("runs kernels without a GPU", "tests"),
    "orbax.checkpoint": ("a new API replaces it", SAVES, READS, FOLDER, ADOPT, "examples", "tests"),
    "jax.experimental.multihost_utils": ("adds up the checksums of several processes", SUMS),
    "flax.nnx.nn.dtypes.promote_dtype": ("promotes as nnx.Linear does", "nsa_jax/nn"),
    "flax.nnx.to_flat_state": ("parameters by path", "nsa_jax/nn", "tests"),
    "flax.nnx.to_pure_dict": ("gradients as a tree", "tests"),
    "flax.nnx.List": ("lists of modules must be declared since flax 0.12", "nsa_jax/model", "tests"),
    "flax.nnx.scan": ("a stack of layers", "examples"),
    "flax.nnx.split_rngs": ("other parameters in each layer of a stack", "examples"),
}
# Used through a variable, so that no name in the source says so.
THROUGH_VARIABLES = {
    "jax.stages.Compiled.memory_analysis": "peak memory, in benchmarks and tests",
    "jax._src.sharding_impls.GSPMDSharding": "nsa_jax.kernels.partition: its attribute `_hlo_sharding`",
    "triton.backends.nvidia.compiler.CUDAOptions.hash": "nsa_jax.kernels.triton.kernel_cache: part of a key",
    "jax_triton.triton_lib.cb": "nsa_jax.kernels.triton.support: whether a compiler is there",
    "jax_triton.triton_lib.triton_kernel_call_lib": "nsa_jax.kernels.triton.support: whether the plugin is",
    "jax_triton.triton_lib.gpu_info.get_gpu_info": "nsa_jax.kernels.chip: what it compiles for",
}


def may_change(name: str) -> bool:
    private = any(part.startswith("_") and not part.endswith("__") for part in name.split("."))
    return private or any(name == part or name.startswith(part + ".") for part in UNSTABLE)


def names(source: str) -> Iterator[str]:
    """Dotted names of other packages that a file imports or reads, the longest of each expression."""
    nodes = list(ast.walk(ast.parse(source)))
    known: dict[str, str] = {}
    for node in nodes:
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
    inner = {id(node.value) for node in nodes if isinstance(node, ast.Attribute)}
    for node in nodes:
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


@functools.cache
def uses() -> dict[str, set[str]]:
    """Files by the names that they use."""
    found: dict[str, set[str]] = {}
    for path in sorted(path for folder in FOLDERS for path in (ROOT / folder).rglob("*.py")):
        for name in changeable(path.read_text(encoding="utf-8")):
            found.setdefault(name, set()).add(path.relative_to(ROOT).as_posix())
    return found


def test_all_uses_are_listed_and_all_that_is_listed_is_used():
    found: dict[str, set[str]] = {entry: set() for entry in USED}
    for name, files in uses().items():
        entries = [entry for entry in USED if name == entry or name.startswith(f"{entry}.")]
        assert entries, f"list {name} with a reason, or use something public"
        found[max(entries, key=len)] |= files

    for entry, (_, *places) in USED.items():
        assert [file for file in found[entry] if not file.startswith(tuple(places))] == [], entry
        unused = [place for place in places if not any(file.startswith(place) for file in found[entry])]
        assert unused == [], f"{entry} is not used there"


def test_the_installed_versions_have_all():
    names = [name for name in (*uses(), *THROUGH_VARIABLES) if exists(name.partition(".")[0])]
    if jax.__version_info__ < (0, 11, 2):  # no test runs its interpreter, see test_mosaic_interpreter
        names = [name for name in names if not name.startswith(INTERPRETER)]

    assert names
    assert [name for name in names if not exists(name)] == []


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
