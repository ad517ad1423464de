"""What the Triton kernels refuse: each case has one clear reason, the same in the table and in the error."""

import dataclasses
import importlib
import importlib.metadata
import subprocess
import sys
import types

import jax
import pytest
from messages import has_form

from nsa_jax import dispatch
from nsa_jax.config import NSAConfig
from nsa_jax.kernels.triton import dims, gpu, support

CONFIG = NSAConfig()


def shapes(dtype="bfloat16", key_dim=128, value_dim=128, heads=4):
    struct = jax.ShapeDtypeStruct
    query, key = struct((1, 99, heads, key_dim), dtype), struct((1, 99, 2, key_dim), dtype)
    value, gates = struct((1, 99, 2, value_dim), dtype), struct((1, 99, heads, 3), dtype)
    return query, key, value, key, value, key, value, gates


@pytest.fixture
def installed(monkeypatch):
    """A machine on which all packages are there, in versions that work, with a GPU of capability 9.0."""
    versions = {"jax": "0.11.2", "jaxlib": "0.11.2", "jax-triton": "0.4.1", "triton": "3.8.0"}
    lowering = types.SimpleNamespace(triton_kernel_call_lib=object(), cb=types)  # any module

    def version(name):
        if name not in versions:
            raise importlib.metadata.PackageNotFoundError(name)
        return versions[name]

    monkeypatch.setattr("nsa_jax.kernels.mosaic_gpu.support._jaxlib", lambda: versions["jaxlib"])
    monkeypatch.setattr(support.importlib.metadata, "version", version)
    monkeypatch.setattr(support.importlib, "import_module", lambda name: lowering)
    monkeypatch.setattr(gpu, "capability", lambda: (9, 0))
    support._installation.cache_clear()
    yield types.SimpleNamespace(versions=versions, lowering=lowering)
    support._installation.cache_clear()


def reason(operation="native_sparse_attention", arrays=None, config=CONFIG, platform="cuda"):
    arrays = shapes() if arrays is None else arrays
    return dispatch.unsupported_reason(operation, "triton", *arrays, config=config, platform=platform)


def test_blocks_of_few_bits_are_no_keys(installed):
    """Int8 is a dtype of caches, too."""
    query, _, _, key, value, *_ = shapes()
    blocks = jax.ShapeDtypeStruct((1, 99, 2, 16), "int8")
    assert reason("selected_attention", (query, key, value, blocks)) is None
    assert reason("selected_probabilities", (query, key, blocks)) is None


def test_paper_configuration_is_supported(installed):
    arrays = shapes(key_dim=192)
    for operation, operands in {
        "native_sparse_attention": arrays,
        "compressed_attention": arrays[:3],
        "select_blocks": arrays[:2],
        "window_attention": arrays[:3],
        "gated_sum": (*arrays[:3], arrays[-1]),
    }.items():
        assert reason(operation, operands) is None
        assert (
            dispatch.choose(operation, *operands, config=CONFIG, platform="cuda").implementation == "triton"
        )


@pytest.mark.parametrize("dim", [16, 32, 48, 64, 80, 96, 128, 144, 160, 192, 256])
def test_dims_of_two_powers_of_two_are_supported(installed, dim):
    assert reason(arrays=shapes(key_dim=dim)) is None
    first, second = dims.split_dim(dim)
    assert first + second == dim


TWO_POWERS = "dims that are a power of two or the sum of two"


@pytest.mark.parametrize(
    ("arrays", "changes", "rule"),
    [
        (shapes(key_dim=40), {}, TWO_POWERS),
        (shapes(value_dim=8), {}, TWO_POWERS),
        (shapes(key_dim=112), {}, TWO_POWERS),
        (shapes(key_dim=512), {}, "256 together"),
        (shapes("float64"), {}, "support the dtypes bfloat16, float16, float32, got float64"),
        (shapes(), dict(selection_block_size=48), "selection_block_size of 16, 32, 64 or 128, got 48"),
        (
            shapes(),
            dict(compression_stride=1),
            "at most 32 compression strides in a selection block, got 64 ",
        ),
        (shapes(key_dim=32, value_dim=32, heads=514), {}, "at most 256 query heads of one KV head"),
        (shapes(), dict(num_selected_blocks=257), "num_selected_blocks of at most 256, got 257"),
    ],
)
def test_each_limit_has_its_reason(installed, arrays, changes, rule):
    config = dataclasses.replace(CONFIG, **changes)
    text = reason(arrays=arrays, config=config)

    assert rule in text
    assert has_form(text)
    assert dict(dispatch.choose(*_call(arrays), config=config, platform="cuda").refused)["triton"] == text
    with pytest.raises(NotImplementedError) as error:
        dispatch.choose(*_call(arrays), config=config, platform="cuda", implementation="triton")
    assert str(error.value) == f"native_sparse_attention cannot run as triton: {text}"


def _call(arrays):
    return ("native_sparse_attention", *arrays)


@pytest.mark.parametrize("package", ["jax-triton", "triton"])
def test_missing_package(installed, package):
    del installed.versions[package]

    assert f"need {package}, got none installed. Install nsa_jax[cuda13]" in reason()
    assert has_form(reason())


@pytest.mark.parametrize(
    ("package", "version", "bounds"),
    [
        ("jax", "0.13.0", ">=0.11.1,<0.13"),
        ("jax-triton", "0.3.1", ">=0.4.1,<0.5"),
        ("triton", "3.9.0", ">=3.8,<3.9"),
        ("triton", "3.7.1", ">=3.8,<3.9"),
        ("jax", "0.11.1rc2", ">=0.11.1,<0.13"),  # comes before 0.11.1
        ("jax", "0.13.0.dev20261101", ">=0.11.1,<0.13"),
    ],
)
def test_wrong_version(installed, package, version, bounds):
    installed.versions[package] = version

    text = reason()
    assert f"need {package}{bounds} (" in text
    assert f"got {version}." in text


@pytest.mark.parametrize(
    ("package", "version"), [("jax", "0.11.1+local"), ("jax", "0.12.0.1"), ("jax-triton", "0.4.1+git0a1b2c3")]
)
def test_version_with_a_label_is_read_as_a_version(installed, package, version):
    """Versions were once cut at their dots, which made 0.11 of `0.11.1+local`: too old."""
    installed.versions[package] = version

    assert reason() is None


def test_import_that_fails_is_quoted(installed, monkeypatch):
    def fail(name):
        raise OSError("libcuda is gone")

    monkeypatch.setattr(support.importlib, "import_module", fail)

    assert "got OSError at its import: libcuda is gone" in reason()


@pytest.mark.parametrize("name", ["triton_kernel_call_lib", "cb"])
def test_private_name_that_is_missing_is_a_reason(installed, name):
    """Another build of jax-triton may lack it; `choose` once raised AttributeError with such a build."""
    delattr(installed.lowering, name)

    text = reason()
    assert "need jax-triton, got AttributeError at its import" in text
    assert name in text
    assert has_form(text)
    chosen = dispatch.choose(*_call(shapes()), config=CONFIG, platform="cuda")
    assert chosen.implementation == "xla"


def test_lowering_support_is_probed_too(installed):
    installed.lowering.triton_kernel_call_lib = None

    assert "need jax-cuda13-plugin, got none installed" in reason()


def test_compiler_that_jax_triton_could_not_import(installed):
    installed.lowering.cb = types.SimpleNamespace()  # jax-triton's stand-in for it

    assert "need a Triton that jax-triton can import, got 3.8.0, which it cannot" in reason()


@pytest.mark.parametrize(
    ("capability", "arrays", "stride", "rule"),
    [
        ((8, 9), shapes("float32", 192), 2, "keys of two selection blocks to fit into shared memory"),
        ((8, 9), shapes("float32", 256, 256, heads=64), 16, "query heads of one KV head"),
        ((8, 9), shapes("bfloat16", 256, 256, heads=128), 16, "heads of one KV head to fit into shared"),
        ((8, 0), shapes("float32", 192, heads=128), 16, "query heads of one KV head"),
    ],
)
def test_tiles_that_a_gpu_cannot_hold(installed, monkeypatch, capability, arrays, stride, rule):
    config = dataclasses.replace(CONFIG, compression_stride=stride)
    monkeypatch.setattr(gpu, "capability", lambda: capability)
    text = reason(arrays=arrays, config=config)
    assert rule in text
    assert has_form(text)

    monkeypatch.setattr(gpu, "capability", lambda: (9, 0))
    assert reason(arrays=arrays, config=config) is None


def test_old_gpu(installed, monkeypatch):
    monkeypatch.setattr(gpu, "capability", lambda: (7, 5))

    assert "need compute capability 8.0 or newer, got 7.5" in reason()


@pytest.mark.parametrize("platform", ["cpu", "tpu", "rocm"])
def test_other_platforms(installed, platform):
    assert f"need an NVIDIA GPU, got platform {platform}" in reason(platform=platform)


def test_importing_the_library_imports_no_triton():
    """Users without a GPU pay nothing for the kernels."""
    program = "import sys, nsa_jax; assert not {'triton', 'jax_triton'} & set(sys.modules), 'imported'"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
