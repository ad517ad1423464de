"""The GPU that a program is compiled for, on machines that are not there."""

import types

import jax

from nsa_jax.kernels import chip


def test_a_machine_of_another_kind_has_no_compute_capability(monkeypatch):
    monkeypatch.setattr(jax, "default_backend", lambda: "tpu")

    assert chip.capability() is None
    assert chip.num_processors() == chip.H100_PROCESSORS


def test_a_gpu_says_what_it_is(monkeypatch):
    gpu = types.SimpleNamespace(compute_capability="12.0", core_count=7)
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    monkeypatch.setattr(jax, "local_devices", lambda: [gpu])

    assert chip.capability() == (12, 0)
    assert chip.num_processors() == 7
