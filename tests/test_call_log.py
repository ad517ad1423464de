"""What the logger `nsa_jax` says about the implementation that a call takes, and how often."""

import logging
import pathlib
import subprocess
import sys

import jax
import jax.numpy as jnp
import pytest
from flax import nnx
from modules import abstract

import nsa_jax
from nsa_jax import call_log, dispatch
from nsa_jax.config import NSAConfig
from nsa_jax.nn import NSAAttention

OUT = jnp.ones((1, 8, 2, 4))
GATES = jnp.full((1, 8, 2, 3), 0.5)


@pytest.fixture(autouse=True)
def nothing_logged_yet(monkeypatch, caplog):
    caplog.set_level(logging.WARNING, logger="nsa_jax")  # a block of the documentation may have set another
    monkeypatch.setattr(call_log, "_logged", set())
    monkeypatch.setattr(call_log, "_warned", set())


def call_sum():
    return nsa_jax.gated_sum(OUT, OUT, OUT, GATES)


def test_a_calling_line_logs_its_choice_once(caplog):
    caplog.set_level(logging.INFO, logger="nsa_jax")
    for _ in range(3):
        call_sum()
    [record] = caplog.records
    line = call_sum.__code__.co_firstlineno + 1
    assert (record.name, record.levelno) == ("nsa_jax", logging.INFO)
    assert f"{pathlib.Path(__file__).name}:{line}: gated_sum runs as xla. " in record.getMessage()
    assert record.getMessage().endswith("good for this call.")


def test_every_calling_line_logs(caplog):
    caplog.set_level(logging.INFO, logger="nsa_jax")
    call_sum()
    nsa_jax.gated_sum(OUT, OUT, OUT, GATES)
    assert len({record.getMessage() for record in caplog.records}) == 2


def test_another_choice_of_the_same_line_is_logged(caplog):
    caplog.set_level(logging.INFO, logger="nsa_jax")
    call_sum()
    with nsa_jax.use_implementation("xla"):
        call_sum()
    assert "forced by use_implementation" in caplog.records[1].getMessage()


def test_debug_adds_what_was_refused(caplog):
    caplog.set_level(logging.INFO, logger="nsa_jax")
    call_sum()
    caplog.set_level(logging.DEBUG, logger="nsa_jax")
    for _ in range(2):
        call_sum()
    refused = [record.getMessage() for record in caplog.records if record.levelno == logging.DEBUG]
    assert len(refused) == 2
    assert "gated_sum does not run as triton: the Triton kernels need an NVIDIA GPU" in refused[0]
    assert "gated_sum does not run as mosaic_gpu: " in refused[1]


def test_the_line_is_the_users_through_jit_and_layers(caplog):
    caplog.set_level(logging.INFO, logger="nsa_jax")
    layer = abstract(NSAAttention, 2, 8, num_kv_heads=1, config=NSAConfig(window_size=8))

    @nnx.jit
    def run(layer, x):
        return layer(x)

    for _ in range(2):
        run.lower(layer, jnp.ones((1, 40, 8)))
    name = pathlib.Path(__file__).name
    line = run.__wrapped__.__code__.co_firstlineno + 2
    messages = [record.getMessage() for record in caplog.records]
    assert all(f"{name}:{line}: " in message for message in messages)
    assert sum("native_sparse_attention" in message for message in messages) == 1


def test_it_is_silent_unless_asked():
    program = (
        "import logging, sys, jax.numpy as jnp, nsa_jax\n"
        "def call(rows): nsa_jax.gated_sum(*[jnp.ones((rows, 8, 2, 4))] * 3, jnp.ones((rows, 8, 2, 3)))\n"
        "call(1); print('asked', file=sys.stderr); logging.basicConfig(level=logging.INFO); call(2)"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    unasked, asked = done.stderr.split("asked\n")
    assert "nsa_jax" not in done.stdout + unasked
    assert "INFO:nsa_jax:<string>:2: gated_sum runs as xla." in asked


@pytest.fixture
def a_gpu(monkeypatch):
    """Calls are placed as on a GPU whose JAX the kernels refuse."""
    reason = "the Triton kernels need jax<0.13 (why), got 0.13.0. Install nsa_jax[cuda13], or use 'xla'."
    monkeypatch.setattr(dispatch, "default_platform", lambda: "cuda")
    monkeypatch.setattr(dispatch.triton, "unsupported_reason", lambda *_, **__: reason)
    return reason


def test_a_fallback_to_xla_on_a_gpu_warns_once(a_gpu, caplog):
    """With JAX 0.12 every call once took `xla`, 25 times as slow, and nothing said so."""
    for _ in range(2):
        call_sum()
        nsa_jax.gated_sum(OUT, OUT, OUT, GATES)
    [record] = caplog.records
    assert record.levelno == logging.WARNING
    assert "gated_sum runs as xla, many times as slow as the GPU kernels: " in record.getMessage()
    assert record.getMessage().endswith(a_gpu)
    assert nsa_jax.choose("gated_sum", OUT).reason.startswith("xla is all that is left on this GPU")


def test_xla_that_was_asked_for_warns_of_nothing(a_gpu, caplog):
    nsa_jax.gated_sum(OUT, OUT, OUT, GATES, implementation="xla")
    with nsa_jax.use_implementation("xla"):
        call_sum()
    assert caplog.records == []


def test_a_call_without_a_frame_of_the_caller(monkeypatch, caplog):
    caplog.set_level(logging.INFO, logger="nsa_jax")
    monkeypatch.setattr(call_log.inspect, "currentframe", lambda: None)
    jax.jit(call_sum)()
    assert caplog.records[0].getMessage().startswith("a call without a Python frame: ")
