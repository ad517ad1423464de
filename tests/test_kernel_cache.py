"""Compiled kernels on disk: found again, never taken for others, and mended where they are damaged."""

import concurrent.futures
import hashlib
import json
import pathlib
import warnings
from unittest import mock

import jax
import jax.numpy as jnp
import pytest

WHERE = "installed by `tox -e test`; not a dependency of nsa_jax"
pytest.importorskip("jax_triton", reason=f"needs jax-triton, {WHERE}", exc_type=ImportError)
pytest.importorskip("jax_cuda13_plugin", reason=f"needs jax-cuda13-plugin, {WHERE}", exc_type=ImportError)

import jax_triton  # noqa: E402
import triton  # noqa: E402
import triton_compile  # noqa: E402
import triton_kernels  # noqa: E402
from triton.backends.nvidia.compiler import CUDABackend  # noqa: E402

from nsa_jax.kernels.triton.gated_sum import gated_sum  # noqa: E402


def sum_of_branches(out, gates):
    return gated_sum(out, out, out, gates)


def arrays(dtype="float32"):
    return jax.ShapeDtypeStruct((1, 8, 2, 16), dtype), jax.ShapeDtypeStruct((1, 8, 2, 3), "float32")


@pytest.fixture
def folder(tmp_path):
    before = jax.config.jax_compilation_cache_dir
    jax.config.update("jax_compilation_cache_dir", str(tmp_path / "cache"))
    yield tmp_path / "cache" / "nsa_jax_kernels"
    jax.config.update("jax_compilation_cache_dir", before)


def lowered(*given, capability=90):
    """The program as a process lowers it that has compiled no kernel yet, and how many it compiled."""
    to_ptx = CUDABackend.make_ptx
    with (
        triton_kernels.kernels_forgotten(),
        mock.patch.object(CUDABackend, "make_ptx", autospec=True, side_effect=to_ptx) as spy,
    ):
        jax.clear_caches()
        text = triton_compile.lower(sum_of_branches, *given, capability=capability).as_text()
    return text, spy.call_count


def test_a_kernel_is_compiled_once(folder):
    first, compiled = lowered(*arrays())
    assert compiled == 1
    assert lowered(*arrays()) == (first, 0)
    assert len(list(folder.iterdir())) == 1


def test_descriptors_of_a_kernel_are_found_again(folder):
    """Kernels of Hopper load through descriptors, of which the compiler says how they are to be made."""
    from nsa_jax import NSAConfig, window_attention

    q, k = (jax.ShapeDtypeStruct((1, 256, n, 64), jnp.bfloat16) for n in (4, 1))

    def attend(q, k, v):
        return window_attention(q, k, v, config=NSAConfig(), implementation="triton").out

    def gradients(*arrays):
        out, pull_back = jax.vjp(attend, *arrays)
        return pull_back(out)

    texts = []
    for _ in range(2):
        with triton_kernels.kernels_forgotten():
            jax.clear_caches()
            texts.append(triton_compile.lower(gradients, q, k, k).as_text())
    assert texts[0] == texts[1]
    assert any(json.loads(x.read_text().split("\n", 1)[1])["tensordesc_meta"] for x in folder.iterdir())


@pytest.mark.parametrize(
    ("dtype", "capability", "num_warps"), [("bfloat16", 90, 4), ("float32", 80, 4), ("float32", 90, 8)]
)
def test_another_kernel_is_not_taken_for_it(folder, dtype, capability, num_warps, monkeypatch):
    lowered(*arrays())
    call = jax_triton.triton_call
    monkeypatch.setattr(jax_triton, "triton_call", lambda *x, **y: call(*x, **y | dict(num_warps=num_warps)))
    without, compiled = lowered(*arrays(dtype), capability=capability)
    assert compiled == 1
    jax.config.update("jax_compilation_cache_dir", None)
    assert lowered(*arrays(dtype), capability=capability) == (without, 1)


@pytest.mark.parametrize(
    "damage",
    [lambda x: x[: len(x) // 2], lambda x: x[:-9] + b"7" + x[-8:], lambda x: b"", lambda x: b"\xff" + x],
)
def test_a_damaged_file_is_written_anew(folder, damage):
    text, _ = lowered(*arrays())
    (file,) = folder.iterdir()
    whole = file.read_bytes()
    file.write_bytes(damage(whole))
    assert lowered(*arrays()) == (text, 1)
    assert file.read_bytes() == whole


def test_a_file_of_another_jax_triton_is_written_anew(folder):
    """Fields that this version does not know."""
    text, _ = lowered(*arrays())
    (file,) = folder.iterdir()
    other = json.dumps({"binary": "", "cubin": ""}).encode()
    file.write_bytes(hashlib.sha256(other).hexdigest().encode() + b"\n" + other)
    assert lowered(*arrays()) == (text, 1)


@pytest.mark.parametrize(
    ("option", "value"),
    [
        ("jax_compilation_cache_dir", None),
        ("jax_compilation_cache_dir", "gs://bucket/cache"),
        ("jax_enable_compilation_cache", False),
    ],
)
def test_nothing_is_kept_where_jax_keeps_nothing(folder, option, value, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    before = getattr(jax.config, option)
    jax.config.update(option, value)
    try:
        assert [lowered(*arrays())[1] for _ in range(2)] == [1, 1]
    finally:
        jax.config.update(option, before)
    assert not list(tmp_path.iterdir())


def test_a_folder_that_cannot_be_written_is_a_warning(folder):
    folder.parent.parent.mkdir(exist_ok=True)
    folder.parent.write_text("a file")
    with pytest.warns(
        UserWarning, match="must have a folder that can be written, got .*Set jax_compilation_cache_dir"
    ):
        assert lowered(*arrays())[1] == 1


def test_a_file_that_fails_leaves_nothing_and_one_warning(folder):
    """As on a full disk. With the name of the file in it, each warning would be another one."""
    from nsa_jax.kernels.triton import kernel_cache

    lowered(*arrays())
    (file,) = folder.iterdir()
    found = kernel_cache._read(file)
    full = OSError(28, "No space left on device", str(file))
    with (
        mock.patch.object(pathlib.Path, "replace", side_effect=full),
        warnings.catch_warnings(record=True) as told,
    ):
        warnings.simplefilter("default")
        for name in "ab":
            kernel_cache._write(folder / name, found)
    assert list(folder.iterdir()) == [file]
    assert len(told) == 1


def test_a_compiler_that_is_watched_compiles(folder, monkeypatch):
    lowered(*arrays())
    monkeypatch.setattr(triton.knobs.compilation, "always_compile", True)
    assert lowered(*arrays())[1] == 1


def test_writers_share_a_folder(folder):
    """Four that write the same file at once: each finds a whole one, and none is left half written."""
    from nsa_jax.kernels.triton import kernel_cache

    text, _ = lowered(*arrays())
    (file,) = folder.iterdir()
    found = kernel_cache._read(file)
    with concurrent.futures.ThreadPoolExecutor(4) as pool:
        list(pool.map(lambda _: kernel_cache._write(file, found), range(40)))
    assert list(folder.iterdir()) == [file]
    assert lowered(*arrays()) == (text, 0)
