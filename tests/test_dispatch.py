"""Which implementation is chosen and why, and that the chosen one runs."""

import functools
import os
import pathlib
import re
import shutil
import subprocess
import sys
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from messages import refused

import nsa_jax
from nsa_jax import attention, cache, dispatch, reference
from nsa_jax.config import NSAConfig

ROOT = pathlib.Path(__file__).parent.parent
CONFIG = NSAConfig(num_selected_blocks=3, window_size=8)
SHAPES = {
    "compressed_attention": ((1, 40, 2, 4), (1, 1, 1, 4), (1, 1, 1, 4)),
    "select_blocks": ((1, 40, 2, 4), (1, 1, 1, 4)),
    "block_scores": ((1, 40, 1, 2, 4), (1, 40, 1, 4)),
    "select_by_index": ((1, 40, 1, 2, 4), (1, 40, 1, 4)),
    "top_blocks": ((1, 40, 1, 1),),
    "selected_attention": ((1, 40, 2, 4), (1, 40, 1, 4), (1, 40, 1, 4), (1, 40, 1, 3)),
    "window_attention": ((1, 40, 2, 4), (1, 40, 1, 4), (1, 40, 1, 4)),
    "block_probabilities": ((1, 40, 2, 4), (1, 40, 1, 4)),
    "selected_probabilities": ((1, 40, 2, 4), (1, 40, 1, 4), (1, 40, 1, 3)),
    "importance_scores": ((1, 40, 2, 4), (1, 1, 1, 4)),
    "gated_sum": ((1, 40, 2, 4),) * 3 + ((1, 40, 2, 3),),
    "native_sparse_attention": ((1, 40, 2, 4), *[(1, 1, 1, 4)] * 2, *[(1, 40, 1, 4)] * 4, (1, 40, 2, 3)),
    "decode_step": ((1, 1, 2, 4), (1, 1, 1, 4), (1, 1, 1, 4)),  # query and compressed keys and values
    "dense_decode_step": ((1, 1, 2, 4), (1, 1, 1, 4), (1, 1, 1, 4)),  # query, keys and values
}
OF_ATTENTION = tuple(name for name in dispatch.OPERATIONS if "decode" not in name)
every_operation = pytest.mark.parametrize("operation", OF_ATTENTION)
not_on_this_machine = pytest.mark.parametrize("implementation", ["triton", "mosaic_gpu"])


def arrays(operation):
    shapes = [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in SHAPES[operation]]
    if operation in ("selected_attention", "selected_probabilities"):
        shapes[-1] = jax.ShapeDtypeStruct(shapes[-1].shape, jnp.int32)
    return shapes


def settings(operation):
    return {} if operation == "gated_sum" else {"config": CONFIG}


def lowered(function, operation, **more):
    program = jax.jit(functools.partial(function, **settings(operation), **more)).lower(*arrays(operation))
    return program.as_text(debug_info=True)


def test_operations_are_those_of_every_module():
    for name in OF_ATTENTION:
        assert all(callable(getattr(module, name)) for module in (nsa_jax, attention, reference))
    for name in dispatch.OPERATIONS:
        assert callable(dispatch._OPERATIONS[name].of(dispatch._offered("xla")))


def test_the_type_lists_what_the_table_has():
    assert sorted(dispatch.IMPLEMENTATIONS) == sorted(dispatch.PREFERENCE)


@every_operation
@pytest.mark.parametrize("implementation", [None, "xla"])
def test_lowered_program_names_what_runs(operation, implementation):
    text = lowered(getattr(attention, operation), operation, implementation=implementation)

    assert f"nsa_jax.xla.{operation}/" in text
    assert "nsa_jax.triton" not in text


@every_operation
def test_reference_is_never_dispatched_to(operation):
    """Its programs do not name `nsa_jax.xla`, a name that only dispatch puts into a program."""
    assert "nsa_jax.xla" not in lowered(getattr(reference, operation), operation)


@pytest.mark.parametrize("operation", dispatch.OPERATIONS)
def test_choice_works_on_shapes_and_explains_itself(operation):
    chosen = dispatch.choose(operation, *arrays(operation), config=CONFIG, platform="cpu")

    assert chosen.implementation == "xla"
    assert chosen.reason.endswith(
        "is the first of ('mosaic_gpu', 'triton', 'xla') that is good for this call."
    )
    assert dict(chosen.refused) == {
        name: dispatch.unsupported_reason(operation, name)
        for name in dispatch.IMPLEMENTATIONS
        if name != "xla"
    }


def test_a_platform_has_two_names():
    calls = dispatch.choose, dispatch.unsupported_reason
    for call, given in zip(calls, (("gated_sum",), ("gated_sum", "triton")), strict=True):
        assert call(*given, platform="gpu") == call(*given, platform="cuda")
    assert "got platform rocm" in dispatch.unsupported_reason("gated_sum", "triton", platform="rocm")


def test_step_runs_as_what_is_chosen():
    held = cache.init_cache(1, 64, num_kv_heads=1, key_dim=4, value_dim=4, config=CONFIG, dtype=jnp.float32)
    query, gates, one = jnp.ones((1, 1, 2, 4)), jnp.ones((1, 1, 2, 3)), jnp.ones((1, 1, 1, 4))

    def step(held, **settings):
        tokens, compress = cache.TokenKeysValues(*[one] * 6), cache.Compression()
        return cache.decode_step(held, query, tokens, gates, config=CONFIG, compress=compress, **settings)

    text = jax.jit(step).lower(held).as_text(debug_info=True)
    assert "nsa_jax.xla.decode_step/" in text
    with refused(NotImplementedError, "decode_step cannot run as triton: the Triton kernels"):
        step(held, implementation="triton")


def test_choice_says_who_made_it():
    assert dispatch.choose("gated_sum", implementation="xla") == ("xla", "xla was named by the caller.", ())
    with nsa_jax.use_implementation("xla"):
        assert dispatch.choose("gated_sum").reason == "xla was forced by use_implementation."
        assert dispatch.choose("gated_sum", implementation="xla").reason == "xla was named by the caller."


@every_operation
@not_on_this_machine
def test_error_of_a_call_is_the_unsupported_reason(operation, implementation):
    reason = dispatch.unsupported_reason(operation, implementation, *arrays(operation), config=CONFIG)
    assert ". Use implementation='xla'" in reason

    with pytest.raises(NotImplementedError) as of_choice:
        dispatch.choose(operation, *arrays(operation), implementation=implementation)
    assert str(of_choice.value) == f"{operation} cannot run as {implementation}: {reason}"

    call = functools.partial(getattr(attention, operation), **settings(operation))
    with pytest.raises(NotImplementedError) as of_call:
        jax.eval_shape(functools.partial(call, implementation=implementation), *arrays(operation))
    assert str(of_call.value).startswith(str(of_choice.value))
    with nsa_jax.use_implementation(implementation), pytest.raises(NotImplementedError) as of_force:
        jax.eval_shape(call, *arrays(operation))
    assert str(of_force.value).startswith(str(of_choice.value))


def test_xla_supports_every_operation():
    assert all(dispatch.unsupported_reason(operation, "xla") is None for operation in dispatch.OPERATIONS)


@pytest.fixture
def constant(monkeypatch):
    """A stand-in for an implementation that cannot run here: each of its gated sums is 42."""

    def gated_sum(out_cmp, out_slc, out_win, gates):
        return jnp.full_like(out_cmp, 42)

    found, reason = dispatch._offered, dispatch.unsupported_reason
    of_42 = types.SimpleNamespace(gated_sum=gated_sum)
    monkeypatch.setattr(dispatch, "PREFERENCE", ("xla", "triton"))
    monkeypatch.setattr(dispatch, "_offered", lambda name: of_42 if name == "triton" else found(name))
    monkeypatch.setattr(
        dispatch,
        "unsupported_reason",
        lambda operation, name, *arrays, **more: (
            None if name == "triton" else reason(operation, name, *arrays, **more)
        ),
    )
    return "triton"


def test_forced_choice_reaches_functions_that_are_already_traced(constant):
    traces = []

    @jax.jit
    def add(*operands):
        traces.append(None)
        return attention.gated_sum(*operands)

    operands = [np.ones(shape, np.float32) for shape in SHAPES["gated_sum"]]

    assert (add(*operands) == 3).all()
    with nsa_jax.use_implementation(constant):
        assert (add(*operands) == 42).all()
        with nsa_jax.use_implementation(None):
            assert (add(*operands) == 3).all()
        with nsa_jax.use_implementation("xla"):
            assert (add(*operands) == 3).all()
        assert (add(*operands) == 42).all()
    assert (add(*operands) == 3).all()
    assert len(traces) <= 3  # one for each choice: going back to one traces nothing


def test_forced_choice_ends_with_an_error_in_its_context(constant):
    with pytest.raises(RuntimeError, match="broken"), nsa_jax.use_implementation(constant):
        raise RuntimeError("broken")

    assert dispatch.choose("gated_sum").implementation == "xla"


def test_name_given_in_the_call_beats_the_forced_one(constant):
    operands = [np.ones(shape, np.float32) for shape in SHAPES["gated_sum"]]
    with nsa_jax.use_implementation(constant):
        assert (attention.gated_sum(*operands, implementation="xla") == 3).all()
    assert (attention.gated_sum(*operands, implementation=constant) == 42).all()


def test_an_implementation_is_a_folder_and_a_row(tmp_path):
    """Without them and its own tests everything imports, other tests that name it too, and a call runs."""
    for path in ROOT.iterdir():
        if path.name in ("nsa_jax", "tests"):
            shutil.copytree(path, tmp_path / path.name, ignore=shutil.ignore_patterns("*mosaic*"))
        elif path.name != ".git":
            (tmp_path / path.name).symlink_to(path)
    file = tmp_path / "nsa_jax" / "dispatch.py"
    table = file.read_text().replace(', "mosaic_gpu"]', "]")
    lines = [line for line in table.splitlines() if not re.search(r'"mosaic_gpu"|mosaic_gpu import', line)]
    file.write_text("\n".join(lines))
    program = (
        "import importlib, pathlib, pkgutil, jax.numpy as jnp, nsa_jax, pytest\n"
        "for module in pkgutil.walk_packages(nsa_jax.__path__, 'nsa_jax.'):\n"
        "    try: module.name.endswith('__main__') or importlib.import_module(module.name)\n"
        "    except ImportError as error: assert error.name.partition('.')[0] in ('triton', 'jax_triton')\n"
        "for path in pathlib.Path('tests').glob('*.py'):\n"
        "    try: 'mosaic' not in path.read_text() or importlib.import_module(path.stem)\n"
        "    except pytest.skip.Exception: pass\n"
        "assert nsa_jax.dispatch.IMPLEMENTATIONS == ('xla', 'triton'), nsa_jax.dispatch.IMPLEMENTATIONS\n"
        "o = jnp.ones((1, 4, 2, 8)); print(nsa_jax.gated_sum(o, o, o, jnp.ones((1, 4, 2, 3))).sum())"
    )

    done = subprocess.run(
        [sys.executable, "-c", program], cwd=tmp_path, capture_output=True, text=True, check=False,
        env={**os.environ, "PYTHONPATH": f"{tmp_path}{os.pathsep}{tmp_path / 'tests'}"},
    )  # fmt: skip

    assert done.returncode == 0, done.stderr[-3000:]
    assert float(done.stdout.split()[-1]) == 3 * 64
