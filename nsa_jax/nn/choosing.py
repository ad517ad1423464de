"""The part of an NSA layer that chooses blocks in whole rows, and computes the loss that teaches it to."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from nsa_jax import attention
from nsa_jax.array_typing import Array, DType, Float, Float32, Int, Int32
from nsa_jax.cache import TokenKeysValues
from nsa_jax.config import NSAConfig
from nsa_jax.dispatch import EVERYWHERE, Implementation
from nsa_jax.layout import first_tokens
from nsa_jax.nn.context import ContextAxis
from nsa_jax.nn.distillation import TARGETS, mean_loss
from nsa_jax.nn.indexer import Indexer
from nsa_jax.nn.joined import beside, projected
from nsa_jax.nn.operands import Operands
from nsa_jax.nn.parts import CompressorFunction, compress_rows
from nsa_jax.nn.projections import token_positions
from nsa_jax.nn.rotary import RotaryFunction, turn
from nsa_jax.nn.selector import Selector, choose
from nsa_jax.option_checks import check_choice


class Choosing(nnx.Module):
    """Chooses by importance, by a selector, or not at all; the layer makes the parameters and projects."""

    num_heads: int
    num_kv_heads: int
    in_features: int
    head_dim: int
    config: NSAConfig
    scale: float
    implementation: Implementation | None
    context: ContextAxis | None
    selects: str  # "importance", "given" or "selector"
    selector: Selector
    rotary: RotaryFunction
    compressor_key: CompressorFunction
    compressor_value: CompressorFunction

    def _operation_settings(self) -> dict[str, Any]:
        return dict(config=self.config, scale=self.scale, implementation=self.implementation)

    def _compress_rows(
        self, key: Array, value: Array, positions: Int[Array, "B T"], segment_ids: Int[Array, "B T"] | None
    ) -> tuple[Array, Array]:
        """Compressed keys and values of whole rows, the keys rotated."""
        where = self.config, segment_ids
        key_cmp = compress_rows(self.compressor_key, key, *where)
        first = first_tokens(positions, *where)
        return turn(self.rotary, key_cmp, first), compress_rows(self.compressor_value, value, *where)

    def _choose(
        self,
        x: Float[Array, "B T D"],
        operands: Operands,
        *,
        positions: Int[Array, "B T"] | None,
        segment_ids: Int[Array, "B T"] | None,
    ) -> Int[Array, "B T K R"]:
        """The blocks that are chosen in whole rows."""
        self._check_selects()
        if self.selects == "importance":
            assert operands.key_cmp is not None
            return attention.select_blocks(
                operands.query, operands.key_cmp, segment_ids=segment_ids, **self._operation_settings()
            )
        queries, keys, at = self._asked(x, operands.query, operands.key_slc, positions, segment_ids)
        return choose(
            self.selector, queries, keys, at, self.num_kv_heads, config=self.config, query_positions=None,
            segment_ids=segment_ids, implementation=self.implementation,
        )  # fmt: skip

    def _asked(
        self,
        x: Float[Array, "B T D"],
        query: Float[Array, "B T N H"],
        key_slc: Float[Array, "B T K H"],
        positions: Int[Array, "B T"] | None,
        segment_ids: Int[Array, "B T"] | None,
    ) -> tuple[Any, Any, Int32[Array, "B T"]]:
        """What the selector projects of whole rows, and the index of each token in its sequence."""
        at = token_positions(x, segment_ids)
        positions = at if positions is None else positions
        queries, keys = self._project_to_choose(*jax.lax.stop_gradient((x, query, key_slc)), positions)
        return queries, keys, at if segment_ids is None else jnp.where(segment_ids == 0, -1, at)

    def _project_to_choose(
        self,
        x: Float[Array, "B T D"],
        query: Float[Array, "B T N H"],
        key_slc: Float[Array, "B T K H"],
        positions: Int[Array, "B T"],
    ) -> tuple[Any, Any]:
        """`project` of the selector, or the same by the joined product of a prepared layer."""
        made, prefix = projected(self, x), "selector."
        own = {name.removeprefix(prefix): out for name, out in made.items() if name.startswith(prefix)}
        if own:
            assert isinstance(self.selector, Indexer)
            return self.selector.turned(own, positions)
        return self.selector.project(beside(self, x), query, key_slc, positions)

    def _tokens_to_choose(self, batch: int, length: int, dtype: DType) -> tuple[jax.ShapeDtypeStruct, ...]:
        """Shapes of what `project` of the selector takes."""
        widths = (self.in_features,), (self.num_heads, self.head_dim), (self.num_kv_heads, self.head_dim)
        of_layer = (jax.ShapeDtypeStruct((batch, length, *width), dtype) for width in widths)
        return *of_layer, jax.ShapeDtypeStruct((batch, length), jnp.int32)

    def _check_selects(self) -> None:
        """Raises ValueError if nothing chooses blocks."""
        if self.selects == "given":
            raise ValueError(
                'a layer with selector="given" must be given block_indices, got None. Pass them to this call.'
            )

    def _check_distil(self, distil: Any) -> None:
        """Raises unless there is a selection that can be taught."""
        check_choice(TARGETS, distil=distil)
        if self.context is not None:
            raise NotImplementedError(
                "a selection loss needs a layer without context_axis, got one. Build the layer without it."
            )
        if self.selects == "given" or (self.selects == "selector" and not hasattr(self.selector, "scores")):
            what = self.selects if self.selects == "given" else type(self.selector).__name__
            raise ValueError(
                f"a selection loss needs a selector with the method scores, got {what}. Leave distil out, "
                "use an IndexerConfig, or write the method as nsa_jax.nn.Selector describes."
            )

    def _selection_loss(
        self,
        x: Float[Array, "B T D"],
        operands: Operands,
        tokens: TokenKeysValues,
        block_indices: Any,
        probabilities: Float[Array, "B T K R"] | None,
        *,
        positions: Int[Array, "B T"] | None,
        segment_ids: Int[Array, "B T"] | None,
    ) -> Float32[Array, ""]:
        """The loss; its target are the probabilities of the attended blocks, or those of dense attention."""
        query, key_slc = jax.lax.stop_gradient((operands.query, operands.key_slc))
        if self.selects == "importance":
            at = token_positions(x, segment_ids)
            fixed: Any = jax.lax.stop_gradient((tokens.key_cmp, tokens.value_cmp))
            key, value = fixed
            keys, _ = self._compress_rows(key, value, at if positions is None else positions, segment_ids)
            at = at if segment_ids is None else jnp.where(segment_ids == 0, -1, at)
            asked: Any = query
            held: Any = keys
            scores: Any = functools.partial(_importance, scale=self.scale)
            scores_slots = False
        else:
            asked, keys, at = self._asked(x, query, key_slc, positions, segment_ids)
            is_module = isinstance(self.selector, nnx.Module)
            graph, state = nnx.split(self.selector) if is_module else (self.selector, ())
            scores_slots = probabilities is not None and hasattr(self.selector, "chosen_scores")
            held, scores = (keys, state), functools.partial(_of_selector, graph, scores_slots)
        return mean_loss(
            scores, asked, held, query, key_slc, block_indices, at, probabilities, segment_ids=segment_ids,
            scores_slots=scores_slots, **self._operation_settings(),
        )  # fmt: skip


def _importance(query: Array, keys: Array, at: Array, **where: Any) -> Float32[Array, "B T K M"]:
    """Scores by importance, with a gradient, which plain JAX alone has."""
    return attention.importance_scores(query, keys, **where | dict(implementation=EVERYWHERE))


def _of_selector(
    selector: Any, scores_slots: bool, queries: Any, held: Any, at: Array, **where: Any
) -> Float32[Array, "B T K M"] | Float32[Array, "B T K R"]:
    """Scores by a selector, given as the graph of a module, whose state is held beside the keys, or whole."""
    keys, state = held
    selector = nnx.merge(selector, state) if isinstance(selector, nnx.GraphDef) else selector
    return (selector.chosen_scores if scores_slots else selector.scores)(queries, keys, at, **where)
