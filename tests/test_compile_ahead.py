"""Kernels that threads compile from the moment when their launches are traced: the same, once, and found."""

import functools
import threading
from unittest import mock

import jax
import jax.numpy as jnp
import pytest

WHERE = "installed by `tox -e test`; not a dependency of nsa_jax"
pytest.importorskip("jax_triton", reason=f"needs jax-triton, {WHERE}", exc_type=ImportError)
pytest.importorskip("jax_cuda13_plugin", reason=f"needs jax-cuda13-plugin, {WHERE}", exc_type=ImportError)

import jax_triton  # noqa: E402
import triton_compile  # noqa: E402
import triton_kernels  # noqa: E402
from jax.sharding import NamedSharding, PartitionSpec  # noqa: E402
from triton.backends.nvidia.compiler import CUDABackend  # noqa: E402

from nsa_jax import NSAConfig, window_attention  # noqa: E402
from nsa_jax.kernels.triton import compile_ahead  # noqa: E402
from nsa_jax.kernels.triton.gated_sum import gated_sum  # noqa: E402

ATTENTION = [jax.ShapeDtypeStruct((2, 256, n, 64), jnp.bfloat16) for n in (4, 2, 2, 4)]
BRANCH = jax.ShapeDtypeStruct((1, 8, 2, 16), jnp.float32)
GATES = jax.ShapeDtypeStruct((1, 8, 2, 3), jnp.float32)


def attend(q, k, v):
    return window_attention(q, k, v, config=NSAConfig(), implementation="triton").out


def gradients(q, k, v, cotangent):
    return jax.vjp(attend, q, k, v)[1](cotangent)


def in_a_loop(q, k, v, cotangent):
    return jax.lax.scan(lambda q, _: (jax.checkpoint(attend)(q, k, v), None), q, length=2)[0] * cotangent


def sum_of_branches(out, gates):
    return gated_sum(out, out, out, gates)


@pytest.fixture
def compilers(monkeypatch):
    """The names of the threads that compiled, a kernel each, since none was known."""
    to_ptx, names = CUDABackend.make_ptx, []

    def spy(*args, **kwargs):
        names.append(threading.current_thread().name)
        return to_ptx(*args, **kwargs)

    monkeypatch.setattr(CUDABackend, "make_ptx", spy)
    with triton_kernels.kernels_forgotten():
        jax.clear_caches()
        yield names


@pytest.fixture
def threads(monkeypatch):
    """Two threads, as on a machine with a GPU, and what they were given to do."""
    found = compile_ahead.threads(2)
    begun = []
    # Each takes the GPU from its own context, where the tests' device is not.
    call = functools.partial(jax_triton.triton_call, compute_capability=90)
    monkeypatch.setattr(jax_triton, "triton_call", call)
    monkeypatch.setattr(compile_ahead, "_threads", lambda: found)
    submit = found.submit
    monkeypatch.setattr(found, "submit", lambda *x, **y: begun.append(submit(*x, **y)) or begun[-1])
    with found:
        yield begun


def lowered(function, *arrays):
    return triton_compile.lower(function, *arrays).as_text()


@pytest.mark.parametrize("function", [gradients, in_a_loop])
def test_the_program_is_the_same(function, compilers, request):
    alone = lowered(function, *ATTENTION)
    needed = len(compilers)
    assert set(compilers) == {"MainThread"}
    compilers.clear()
    request.getfixturevalue("threads")
    with triton_kernels.kernels_forgotten():
        jax.clear_caches()
        assert lowered(function, *ATTENTION) == alone
    assert "MainThread" not in compilers
    assert needed <= len(compilers) <= needed + 2  # a forward that is traced and not used
    assert not compile_ahead._jobs


def test_a_launch_is_begun_once(compilers, threads):
    for scale in (1, 2):
        lowered(lambda *x: scale * sum_of_branches(*x), BRANCH, GATES)  # noqa: B023
    assert len(threads) == len(compilers) == 1


def test_what_is_only_traced_waits_for_nothing(compilers, threads):
    jax.eval_shape(sum_of_branches, BRANCH, GATES)
    (job,) = threads
    job.result()
    assert len(compilers) == 1
    lowered(sum_of_branches, BRANCH, GATES)
    assert len(compilers) == 1


def test_many_programs_leave_nothing_behind(compilers, threads):
    for tokens, dtype in ((8, "float32"), (16, "float32"), (16, "float16"), (16, "bfloat16")):
        lowered(
            sum_of_branches,
            *(jax.ShapeDtypeStruct((1, tokens, *x.shape[2:]), dtype) for x in (BRANCH, GATES)),
        )
    assert len(threads) == 4
    assert not any(job.result() for job in threads)
    assert not compile_ahead._jobs
    assert len(compile_ahead._kernels) == 1  # of the last program


def test_who_stops_waiting_ends_what_has_not_begun(compilers, threads, monkeypatch):
    go_on = threading.Event()
    to_ptx = CUDABackend.make_ptx

    def slow(*args, **kwargs):
        go_on.wait(60)
        return to_ptx(*args, **kwargs)

    def stop(_):
        go_on.set()
        raise KeyboardInterrupt

    monkeypatch.setattr(CUDABackend, "make_ptx", slow)
    monkeypatch.setattr(compile_ahead, "wait", stop)
    with pytest.raises(KeyboardInterrupt):
        lowered(gradients, *ATTENTION)
    assert any(job.cancelled() for job in threads)


def test_on_two_gpus(compilers, threads):
    """In a `shard_map`, and where XLA asks for kernels while it divides the program."""
    mesh = triton_compile.mesh_of_h100s(x=2)
    heads = NamedSharding(mesh, PartitionSpec(None, None, "x"))
    q = jax.ShapeDtypeStruct((1, 128, 2, 64), jnp.bfloat16, sharding=heads)
    in_shards = jax.shard_map(attend, mesh=mesh, in_specs=(heads.spec,) * 3, out_specs=heads.spec)
    for function in (in_shards, attend):
        threads.clear()
        with jax.set_mesh(mesh):
            jax.jit(function).lower(q, q, q).compile(compiler_options=triton_compile.FAST_TO_COMPILE)
        assert threads
        assert not any(job.exception() for job in threads)
    assert "MainThread" not in compilers


def test_what_a_thread_fails_to_compile_the_program_compiles(compilers, threads, monkeypatch):
    to_ptx = CUDABackend.make_ptx

    def only_in_the_program(*args, **kwargs):
        if threading.current_thread().name != "MainThread":
            raise RuntimeError("out of memory")
        return to_ptx(*args, **kwargs)

    monkeypatch.setattr(CUDABackend, "make_ptx", only_in_the_program)
    lowered(sum_of_branches, BRANCH, GATES)
    assert [str(job.exception()) for job in threads] == ["out of memory"]
    assert compilers == ["MainThread"]


def test_values_begin_nothing(threads):
    with mock.patch.object(jax_triton, "triton_call", return_value=jnp.zeros(())) as call:
        sum_of_branches(jnp.zeros(BRANCH.shape), jnp.zeros(GATES.shape))
    call.assert_called_once()
    assert not threads


def test_without_a_gpu_there_are_no_threads():
    assert compile_ahead._threads() is None
