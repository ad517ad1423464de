"""A raw launch inside loops, branches and `jax.checkpoint`, where JAX asks what of it dead code needs."""

import jax
import jax.numpy as jnp
import pytest

WHERE = "installed by `tox -e test`; not a dependency of nsa_jax"
pytest.importorskip("jax_triton", reason=f"needs jax-triton, {WHERE}", exc_type=ImportError)
pytest.importorskip("jax_cuda13_plugin", reason=f"needs jax-cuda13-plugin, {WHERE}", exc_type=ImportError)

import triton_compile  # noqa: E402
from jax.interpreters.partial_eval import dce_rules  # noqa: E402
from jax_triton.triton_lib import triton_kernel_call_p  # noqa: E402

from nsa_jax.kernels.triton import dead_launches  # noqa: E402
from nsa_jax.kernels.triton.gated_sum import gated_sum  # noqa: E402

OUT = jax.ShapeDtypeStruct((1, 8, 2, 16), jnp.float32)
GATES = jax.ShapeDtypeStruct((1, 8, 2, 3), jnp.float32)


def scanned(out, gates):
    return jax.lax.scan(lambda x, _: (gated_sum(x, x, x, gates), x), out, length=3)[0]


def branched(out, gates):
    return jax.lax.cond(gates[0, 0, 0, 0] > 0, lambda x: gated_sum(x, x, x, gates), lambda x: x, out)


def rematerialised(out, gates):
    return jax.checkpoint(lambda x: gated_sum(x, x, x, gates))(out)


def unused(out, gates):
    gated_sum(out, out, out, gates)
    return out


@pytest.mark.parametrize("program", [scanned, branched, rematerialised, unused])
def test_a_raw_launch_lowers(program):
    """On JAX 0.12 jax-triton 0.4.1 raised TypeError: its rule takes 2 arguments, and was given 3."""
    assert triton_compile.lower(program, OUT, GATES).as_text().count("triton_kernel_call_ffi") == 1


@pytest.fixture
def rule_of(monkeypatch):
    def give(rule):
        monkeypatch.setitem(dce_rules, triton_kernel_call_p, rule)

    return give


def test_a_rule_of_two_parameters_gets_the_arguments_of_both_versions(rule_of):
    rule_of(lambda used_outs, eqn: (used_outs, eqn))

    assert dead_launches.follow_jax()
    assert dce_rules[triton_kernel_call_p]("used", "eqn") == ("used", "eqn")
    assert dce_rules[triton_kernel_call_p]("used", "live", "eqn") == ("used", "eqn")


def test_a_rule_of_three_parameters_stays(rule_of):
    rule_of(new := lambda used_outs, live_ins, eqn: (used_outs, eqn))

    assert not dead_launches.follow_jax()
    assert dce_rules[triton_kernel_call_p] is new
