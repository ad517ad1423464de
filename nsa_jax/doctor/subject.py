"""What a check runs and what it expects, and the random operands of all of them.

What is expected comes from `nsa_jax.reference` in float64, on the numbers that the operands have in the dtype
that is checked. The same maths in that dtype gives the budget.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from nsa_jax import NSAConfig, layout
from nsa_jax.budget import allowance, size

# Small, and yet every branch hides keys, and blocks compete for a slot.
CONFIG = NSAConfig(selection_block_size=32, num_selected_blocks=4, window_size=48)
TOKENS, HEADS, KV_HEADS, DIM = 144, 16, 2, 64  # the last token completes a compression block
INDEX_HEADS = 2
# Half the compile time of the oracle would go into optimising it, and its speed does not matter.
_ORACLE = {"xla_backend_optimization_level": 0}

type Results = dict[str, Any]  # arrays by the name of the quantity


class Expected(NamedTuple):
    """The exact value of a quantity, and how far from it a result may be."""

    exact: np.ndarray
    budget: float


class Subject(NamedTuple):
    """An operation in one dtype.

    Attributes:
      operation: its name in `nsa_jax.dispatch.OPERATIONS`.
      arrays: those that `nsa_jax.choose` takes.
      run: computes all quantities by the implementation of the name that it is given.
      expect: computes what they should be.
    """

    operation: str
    arrays: tuple[Any, ...]
    run: Callable[[Any], Results]
    expect: Callable[[], dict[str, Expected]]


def draw(rng: np.random.Generator, dtype: str) -> Results:
    """Operands by name: normal, and gates between 0 and 1."""
    num_blocks = layout.num_compression_blocks(TOKENS, CONFIG)

    def normal(tokens: int, heads: int) -> np.ndarray:
        return rng.standard_normal((1, tokens, heads, DIM)).astype(jnp.dtype(dtype))

    operands = {name: normal(TOKENS, HEADS) for name in ("query", "out_cmp", "out_slc", "out_win")}
    for branch, tokens in dict(cmp=num_blocks, slc=TOKENS, win=TOKENS).items():
        operands |= {f"{kind}_{branch}": normal(tokens, KV_HEADS) for kind in ("key", "value")}
    operands |= {"query_index": normal(TOKENS, KV_HEADS * INDEX_HEADS).reshape(1, TOKENS, KV_HEADS, -1, DIM)}
    operands |= {
        "key_index": normal(TOKENS, 1),
        "weights": normal(TOKENS, KV_HEADS)[..., :INDEX_HEADS],
    }
    operands |= {"scores": normal(TOKENS, KV_HEADS)[..., : layout.num_selection_blocks(TOKENS, CONFIG)]}
    return operands | {"gates": rng.uniform(size=(1, TOKENS, HEADS, 3)).astype(jnp.dtype(dtype))}


def oracle(function: Callable[..., Any], dtype: str, *arrays: Any) -> Any:
    """What a function of `nsa_jax.reference` gives in a dtype, as NumPy arrays.

    It runs on the CPU where JAX has one, so that it shares nothing with the GPU that is to be checked.
    """
    try:
        device = jax.local_devices(backend="cpu")[0]
    except RuntimeError:  # JAX is told to use the GPU alone
        device = jax.local_devices()[0]

    def cast(x: np.ndarray) -> np.ndarray:
        return x if x.dtype.kind in "ib" else x.astype(jnp.dtype(dtype))

    with jax.default_device(device), jax.enable_x64(dtype == "float64"):
        run = jax.jit(function, compiler_options=_ORACLE if device.platform == "cpu" else None)
        return jax.tree.map(np.asarray, run(*jax.tree.map(cast, arrays)))


def expected(
    function: Callable[..., Results], dtype: str, *arrays: Any, logit: float = 0.0
) -> dict[str, Expected]:
    """The quantities that a function of `nsa_jax.reference` computes, with their budgets.

    Args:
      function: takes the arrays and returns arrays by the name of the quantity.
      dtype: that of the operands.
      *arrays: NumPy arrays, or trees of them.
      logit: the largest logit, see `largest_logit`. An implementation keeps logits and log-sum-exps in
        float32. Their rounding by `eps |logit|` is a relative error of the weights, `exp(logit - lse)`, which
        the oracle does not make: where a query sees one key, its weight is exactly 1.
    """
    exact, same = (oracle(function, precision, *arrays) for precision in ("float64", dtype))
    of_weights = 8 * float(jnp.finfo(jnp.float32).eps) * logit
    return {
        name: Expected(
            exact[name],
            allowance(value, exact[name], float(jnp.finfo(value.dtype).eps)) + of_weights * size(exact[name]),
        )
        for name, value in same.items()
    }


def largest_logit(query: Any, *keys: Any) -> float:
    """The largest |logit| of any query and key, whether the query sees the key or not."""
    rows, *others = (x.astype("float32").reshape(-1, DIM) for x in (query, *keys))
    return max(float(np.abs(rows @ x.T).max()) for x in others) * DIM**-0.5
