"""Fixtures for each test of a file about benchmarks: neither the ceiling nor a draw takes its time."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from benchmarks import inputs, roofline


@pytest.fixture(autouse=True)
def quick_ceiling(monkeypatch):
    measure = roofline.measure_ceiling
    monkeypatch.setattr(
        roofline, "measure_ceiling", lambda dtype: measure(dtype, matmul_size=64, copy_bytes=1 << 16)
    )


@pytest.fixture(autouse=True)
def quick_draws(monkeypatch, request):
    """Random arrays from NumPy: JAX compiles a program for each shape. Tests of the draws take JAX's."""
    if "jax_draws" in request.fixturenames:
        return
    by_jax = jax.random.normal

    def drawn(key, uniform, size, dtype):
        rng = np.random.default_rng(np.asarray(jax.random.key_data(key)))
        numbers = (rng.random if uniform else rng.standard_normal)(size)
        return jax.device_put(numbers.astype(jnp.dtype(dtype)))

    def normal(key, shape=(), dtype=jnp.float32, **sharding):
        if isinstance(key, jax.core.Tracer) or sharding:
            return by_jax(key, shape, dtype, **sharding)
        return drawn(key, False, shape, dtype)

    monkeypatch.setattr(inputs, "_drawn", drawn)
    monkeypatch.setattr(jax.random, "normal", normal)


@pytest.fixture
def jax_draws():
    """Names what a test takes from JAX instead of `quick_draws`."""
