"""All operations of one module on one case, with their gradients, as one compiled program that tests share.

Compiling is what these tests spend their time on, so a program takes its operands, index arrays, selection
and cotangents as arguments: other numbers of the same case cost nothing.
"""

import functools
import inspect
import types
from typing import Any

import brute_force
import jax
import jax.numpy as jnp
import numpy as np
from cases import BY_NAME, Case, Operands

from nsa_jax import arguments, attention, layout, reference
from nsa_jax.budget import distance, size
from nsa_jax.kernels import xla
from nsa_jax.kernels.xla.sizes import Sizes

MODULES = {"reference": reference, "xla": attention, "triton": attention}

# Half the compile time of the oracle would go into optimising it, and its speed does not matter.
OPTIONS = {"reference": {"xla_backend_optimization_level": 0}, "xla": {}, "triton": {}}

BRANCHES = ("cmp", "slc", "win")

type Results = dict[str, np.ndarray]


def evaluate(
    module: str,
    case: Case,
    dtype: Any = "float64",
    *,
    operands: Operands | None = None,
    block_indices: np.ndarray | None = None,
    cotangents: Results | None = None,
    sizes: Sizes | None = None,
) -> Results:
    """Results by name: `out*`, `lse_*`, `blocks` and `d_<operand>`.

    The selected branch attends `block_indices`, by default what brute force selects. Gradients are those of
    all outputs and log-sum-exps under `cotangents`, by default random.
    """
    operands = case.draw() if operands is None else operands
    cotangents = random_cotangents(case) if cotangents is None else cotangents
    block_indices = by_brute_force(case.name)["blocks"] if block_indices is None else block_indices
    segment_ids = case.segment_ids
    with jax.enable_x64(jnp.dtype(dtype) == jnp.float64):
        results = _program(module, case, sizes)(
            jax.tree.map(lambda x: np.asarray(x, jnp.dtype(dtype)), operands),
            jnp.asarray(block_indices, jnp.int32),
            jnp.asarray(case.query_positions),
            None if segment_ids is None else jnp.asarray(segment_ids),
            jax.tree.map(lambda x: np.asarray(x, jnp.dtype(dtype)), cotangents),
        )
    return {name: np.asarray(x) for name, x in results.items()}


@functools.cache
def cached(module: str, name: str, dtype: str = "float64") -> Results:
    """`evaluate` of a case as it stands; do not write into it."""
    return evaluate(module, BY_NAME[name], dtype)


@functools.cache
def by_brute_force(name: str) -> Results:
    """`brute_force.evaluate` of a case as it stands; do not write into it."""
    case = BY_NAME[name]
    return brute_force.evaluate(case, case.draw())


@functools.cache
def random_cotangents(case: Case) -> Results:
    """Random cotangents of all outputs and log-sum-exps, in float64."""
    rng = case.generator("cotangents")
    batch, queries = case.query_positions.shape
    out = (batch, queries, case.num_heads, case.value_dim)
    shapes = {"out": out} | {f"out_{x}": out for x in BRANCHES} | {f"lse_{x}": out[:3] for x in BRANCHES}
    return {name: rng.standard_normal(shape) for name, shape in shapes.items()}


def in_tiles(sizes: Sizes) -> types.SimpleNamespace:
    """The operations of `nsa_jax.attention` by the `xla` implementation, with other chunk and tile sizes."""

    def run(name, *arrays, config, scale, query_positions, segment_ids, implementation):
        assert implementation == "xla"
        names = [*inspect.signature(getattr(attention, name)).parameters][: len(arrays)]
        call = arguments.check(
            getattr(attention, name), dict(zip(names, arrays, strict=True)), config=config, scale=scale,
            query_positions=query_positions, segment_ids=segment_ids,
        )  # fmt: skip
        more = (None,) if name == "select_blocks" else ()  # the log-sum-exps
        return getattr(xla, name)(*arrays, *more, *call, sizes=sizes)

    names = ("compressed_attention", "select_blocks", "selected_attention", "window_attention")
    operations = {name: functools.partial(run, name) for name in names}
    return types.SimpleNamespace(**operations, gated_sum=attention.gated_sum)


@functools.cache
def _program(module: str, case: Case, sizes: Sizes | None):
    operations = MODULES[module] if sizes is None else in_tiles(sizes)
    settings = dict(config=case.config, scale=case.scale)
    if module != "reference":
        settings |= dict(implementation=module)

    def forward(operands: Operands, block_indices, query_positions, segment_ids):
        shared = settings | dict(query_positions=query_positions, segment_ids=segment_ids)
        q = operands.query
        cmp = operations.compressed_attention(q, operands.key_cmp, operands.value_cmp, **shared)
        slc = operations.selected_attention(q, operands.key_slc, operands.value_slc, block_indices, **shared)
        win = operations.window_attention(q, operands.key_win, operands.value_win, **shared)
        results = {}
        for branch, (out, lse) in zip(BRANCHES, (cmp, slc, win), strict=True):
            results |= {f"out_{branch}": out, f"lse_{branch}": lse}
        results["out"] = operations.gated_sum(cmp[0], slc[0], win[0], operands.gates)
        return results

    def everything(operands, block_indices, query_positions, segment_ids, cotangents):
        def differentiable(operands):
            results = forward(operands, block_indices, query_positions, segment_ids)
            return {k: results[k] for k in cotangents}, {
                k: v for k, v in results.items() if k not in cotangents
            }

        results, pull_back, others = jax.vjp(differentiable, operands, has_aux=True)
        (gradients,) = pull_back({k: x.astype(results[k].dtype) for k, x in cotangents.items()})
        blocks = operations.select_blocks(
            operands.query,
            operands.key_cmp,
            query_positions=query_positions,
            segment_ids=segment_ids,
            **settings,
        )
        gradients = {f"d_{name}": x for name, x in gradients._asdict().items()}
        return results | others | gradients | {"blocks": blocks}

    return jax.jit(everything, compiler_options=OPTIONS[module])


@functools.cache
def _importance_program(case: Case):
    score = functools.partial(reference.importance, config=case.config, scale=case.scale)
    return jax.jit(score, compiler_options=OPTIONS["reference"])


def importance(case: Case, operands: Operands, dtype: Any = "float64") -> np.ndarray:
    """The reference's scores [B, T, K, M]."""
    with jax.enable_x64(jnp.dtype(dtype) == jnp.float64):
        score = _importance_program(case)
        query, key_cmp = (jnp.asarray(x, dtype) for x in (operands.query, operands.key_cmp))
        positions, segment_ids = case.query_positions, case.segment_ids
        return np.asarray(score(query, key_cmp, query_positions=positions, segment_ids=segment_ids))


def settled(case: Case, scores: np.ndarray, error: float) -> np.ndarray:
    """[B, T, K]: whether no rounding of the scores by `error` can change the choice of the best blocks."""
    with jax.enable_x64(True):
        placed = layout.place(
            case.config, batch=case.batch, num_queries=case.query_positions.shape[1], num_keys=case.num_keys,
            query_positions=jnp.asarray(case.query_positions), segment_ids=case.segment_ids,
        )  # fmt: skip
        position = np.asarray(placed.position)[:, :, None, None]
    block = np.arange(scores.shape[-1])
    current = position // case.config.selection_block_size
    forced = (block < case.config.num_initial_blocks) | (block > current - case.config.num_local_blocks)
    candidate = block * case.config.selection_block_size <= position
    free = np.where(candidate & ~forced, scores, -np.inf)
    slots = case.config.num_selected_blocks - (candidate & forced).sum(-1, keepdims=True)
    ranked = -np.sort(-free, axis=-1)
    ranked = np.concatenate(
        [np.full_like(ranked[..., :1], np.inf), ranked, np.full_like(ranked, -np.inf)], -1
    )
    last_in = np.take_along_axis(ranked, slots, -1)[..., 0]
    first_out = np.take_along_axis(ranked, slots + 1, -1)[..., 0]
    with np.errstate(invalid="ignore"):  # inf - inf where no block was left out
        return (first_out == -np.inf) | (last_in - first_out > 2 * error)


def disagreements(
    found: Results, expected: Results, *, only: tuple[str, ...] | None = None
) -> dict[str, float]:
    """Float64 results, by name, that differ by more than rounding.

    1e-12 are 4500 eps: more than the terms of the longest sum here (64 heads times 50 queries), and far less
    than the error that one key too many or too few makes.
    """
    names = expected.keys() & found.keys() if only is None else only
    far = {name: distance(found[name], expected[name]) for name in names}
    return {name: x for name, x in far.items() if not x <= 1e-12 * max(1, size(expected[name]))}
