"""A small decoder-only language model with NSA, dense attention or a window, as chosen for each layer."""

from collections.abc import Sequence
from typing import Any, Literal, overload

import jax
import jax.numpy as jnp
from flax import nnx

from nsa_jax.array_checks import check_arrays, check_ids, check_integers
from nsa_jax.array_typing import Array, DType, Float, Int
from nsa_jax.cache import DenseCache, NSACache
from nsa_jax.dispatch import Implementation
from nsa_jax.model.config import TransformerConfig
from nsa_jax.model.layer import DecoderLayer, LayerCache, norm
from nsa_jax.model.stack import Step, run_layers
from nsa_jax.model.token_divergence import token_divergences
from nsa_jax.model.token_loss import next_tokens, token_losses
from nsa_jax.nn import Selection, products
from nsa_jax.nn.checks import check_array, check_rngs
from nsa_jax.nn.context import ContextAxis
from nsa_jax.nn.distillation import Target
from nsa_jax.nn.projections import Sharding, check_sharding, sharding_metadata
from nsa_jax.option_checks import check_choice
from nsa_jax.parallel import Order


class Transformer(nnx.Module):
    """Decoder-only language model: embedding, layers of attention and a gated MLP, RMSNorm, logits.

    The layers are a Python list, so each of them adds to the time of tracing and compiling, unless the
    `scan_layers` of the configuration lets a forward pass scan those that are alike.

    Args:
      config: widths, depth, and kind of attention of each layer.
      sharding: mesh axes of the dimensions "model", "heads", "kv_heads", "mlp" and "vocab", see
        `nsa_jax.nn.NSAAttention`.
      context_axis: mesh axis over which the tokens of a row are spread, see `nsa_jax.nn.NSAAttention`; for
        models of NSA layers only.
      context_order: order of the tokens on the devices, "zigzag" or "contiguous".
      implementation: one of `nsa_jax.dispatch.IMPLEMENTATIONS`, or None for the best that can run the call,
        see `nsa_jax.choose`.
      rngs: source of the initial parameters.

    Raises:
      NotImplementedError: there is a `context_axis`, and a layer that is not "nsa".
      TypeError: an argument is of the wrong kind.
      ValueError: `sharding` has an unknown name, or the mesh in context cannot shard a parameter as asked; or
        `context_order` or `implementation` is unknown.

    Examples:
      >>> config = TransformerConfig(vocab_size=256, num_layers=2, model_dim=128, num_heads=4, num_kv_heads=1)
      >>> logits = Transformer(config, rngs=nnx.Rngs(0))(tokens)  # tokens [B, T], logits [B, T, 256]
    """

    def __init__(
        self,
        config: TransformerConfig,
        *,
        sharding: Sharding | None = None,
        context_axis: str | None = None,
        context_order: Order = "zigzag",
        implementation: Implementation | None = None,
        rngs: nnx.Rngs,
    ):
        if not isinstance(config, TransformerConfig):
            raise TypeError(
                f"config must be a TransformerConfig, got {type(config).__name__}. Build one with "
                "TransformerConfig(...)."
            )
        check_rngs(rngs)
        check_sharding(sharding, vocab=config.vocab_size)
        configs = config.per_layer
        context = ContextAxis.given(context_axis, context_order)
        if context is not None and any(each.attention != "nsa" for each in configs):
            raise NotImplementedError(
                f"context_axis needs NSA layers, got attention={config.attention!r}. "
                'Build the model with attention="nsa".'
            )
        self.config = config
        self.embed = nnx.Embed(
            config.vocab_size,
            config.model_dim,
            dtype=config.dtype,
            param_dtype=config.param_dtype,
            promote_dtype=_promote_table,
            embedding_metadata=sharding_metadata(sharding, "vocab", "model"),
            rngs=rngs,
        )
        arguments: dict[str, Any] = dict(
            sharding=sharding, context_axis=context_axis, context_order=context_order,
            implementation=implementation, rngs=rngs,
        )  # fmt: skip
        self.layers = nnx.List([DecoderLayer(each, **arguments) for each in configs])
        self.final_norm = norm(config, rngs)
        if not config.tie_embeddings:
            self.lm_head = nnx.Linear(
                config.model_dim,
                config.vocab_size,
                use_bias=False,
                dtype=config.dtype,
                param_dtype=config.param_dtype,
                kernel_metadata=sharding_metadata(sharding, "model", "vocab"),
                rngs=rngs,
            )

    @property
    def vocab_size(self) -> int:
        """Number of tokens in the vocabulary, by which `nsa_jax.generate.generate` checks prompts."""
        return self.config.vocab_size

    @overload
    def __call__(
        self,
        tokens: Int[Array, "B T"],
        *,
        positions: Int[Array, "B T"] | None = None,
        segment_ids: Int[Array, "B T"] | None = None,
        block_indices: Sequence[Int[Array, "B T K R"]] | None = None,
        distil: None = None,
    ) -> Float[Array, "B T vocab"]: ...

    @overload
    def __call__(
        self,
        tokens: Int[Array, "B T"],
        *,
        positions: Int[Array, "B T"] | None = None,
        segment_ids: Int[Array, "B T"] | None = None,
        block_indices: Sequence[Int[Array, "B T K R"]] | None = None,
        distil: Target,
    ) -> tuple[Float[Array, "B T vocab"], Float[Array, ""]]: ...

    def __call__(
        self,
        tokens: Int[Array, "B T"],
        *,
        positions: Int[Array, "B T"] | None = None,
        segment_ids: Int[Array, "B T"] | None = None,
        block_indices: Sequence[Int[Array, "B T K R"]] | None = None,
        distil: Target | None = None,
    ) -> Any:
        """Computes, for each token, the logits of the token that follows it.

        Args:
          tokens: token ids, at least 0 and below `vocab_size`.
          positions: rotary position of each token, by default its index in its sequence.
          segment_ids: sequence of each token of packed rows: each non-zero id is one contiguous run,
            0 = padding.
          block_indices: a selection for each NSA layer to use instead of choosing one, such as `inspect`
            returns.
          distil: whether to return the sum of the selection losses of the NSA layers, too, see
            `nsa_jax.nn.NSAAttention`: "dense" or "selected".

        Returns:
          Logits `[B, T, vocab]` in float32, or in float64 for a float64 computation. With `distil`, the pair
          of logits and loss.

        Raises:
          NotImplementedError: `block_indices` or `distil` are given, and no layer is "nsa"; or layers are
            scanned, and a part of your own changes its variables.
          TypeError: `tokens` is not an array, or an index array not one of integers.
          ValueError: `tokens` is not a matrix of integers, or the shape of an argument does not fit it; or an
            id is not in the vocabulary, where the host has its value: outside `jit`, in NumPy arrays and in
            JAX arrays on a CPU. Elsewhere the logits of such an id are meaningless. Or there is not one
            selection for each NSA layer.
        """
        x, loss = self._layers(tokens, positions, segment_ids, block_indices, distil)
        logits = self._logits(x)
        return logits if distil is None else (logits, loss)

    @overload
    def loss(
        self,
        tokens: Int[Array, "B T"],
        *,
        targets: Int[Array, "B T"] | None = None,
        reduce: Literal["mean"] | None = "mean",
        positions: Int[Array, "B T"] | None = None,
        segment_ids: Int[Array, "B T"] | None = None,
        block_indices: Sequence[Int[Array, "B T K R"]] | None = None,
        distil: None = None,
        teacher: None = None,
    ) -> Array: ...

    @overload
    def loss(
        self,
        tokens: Int[Array, "B T"],
        *,
        targets: Int[Array, "B T"] | None = None,
        reduce: Literal["mean"] | None = "mean",
        positions: Int[Array, "B T"] | None = None,
        segment_ids: Int[Array, "B T"] | None = None,
        block_indices: Sequence[Int[Array, "B T K R"]] | None = None,
        distil: Target,
        teacher: None = None,
    ) -> tuple[Array, Float[Array, ""]]: ...

    @overload
    def loss(
        self,
        tokens: Int[Array, "B T"],
        *,
        targets: Int[Array, "B T"] | None = None,
        reduce: Literal["mean"] | None = "mean",
        positions: Int[Array, "B T"] | None = None,
        segment_ids: Int[Array, "B T"] | None = None,
        block_indices: Sequence[Int[Array, "B T K R"]] | None = None,
        distil: Target | None = None,
        teacher: "Transformer",
    ) -> tuple[Array, ...]: ...

    def loss(
        self,
        tokens: Int[Array, "B T"],
        *,
        targets: Int[Array, "B T"] | None = None,
        reduce: Literal["mean"] | None = "mean",
        positions: Int[Array, "B T"] | None = None,
        segment_ids: Int[Array, "B T"] | None = None,
        block_indices: Sequence[Int[Array, "B T K R"]] | None = None,
        distil: Target | None = None,
        teacher: "Transformer | None" = None,
    ) -> Any:
        """Computes the cross entropy of the next token, in nats, without ever holding all logits.

        The logits are computed for a chunk of tokens at a time, in the backward pass again, see
        `nsa_jax.model.token_losses`.

        Args:
          tokens: token ids, see `__call__`.
          targets: id that each token is to predict; a negative one stands for none. By default the next token
            of its sequence, `nsa_jax.model.next_tokens(tokens, segment_ids)`.
          reduce: "mean" over the tokens that have a target, or None for the loss of each token.
          positions: rotary position of each token, see `__call__`.
          segment_ids: sequence of each token, see `__call__`.
          block_indices: a selection for each NSA layer, see `__call__`.
          distil: whether to return the sum of the selection losses of the NSA layers, too, see `__call__`.
            Both come from one pass through the layers.
          teacher: a model of the same vocabulary, such as the dense one that this one was made of, to return
            the divergence from its distributions of the next token, too, see
            `nsa_jax.model.token_divergences`. It gets no gradient, and has no dropout.

        Returns:
          The mean, in float32, or in float64 for a float64 computation; 0 if no token has a target. With
          `reduce=None` losses `[B, T]`, 0 for tokens without a target. With `distil` or a `teacher` a tuple
          of that, the selection loss, and the divergence, reduced as the loss is; each if it is asked for.

        Raises:
          NotImplementedError, TypeError: as in `__call__`.
          ValueError: as in `__call__`; or `reduce` is unknown; or there are no `targets`, and the model has a
            `context_axis`, whose devices do not have the next token of each; or the `teacher` has another
            vocabulary, or there is one and a `context_axis`.
        """
        if reduce is not None:
            check_choice(("mean",), reduce=reduce)
        self._check_tokens(tokens)
        in_context = any(getattr(layer.attention, "context", None) for layer in self.layers)
        if targets is None and in_context:
            raise ValueError(
                "targets of a model with a context_axis must be given, got None. Pass next_tokens(...), in "
                "the order of the tokens."
            )
        self._check_teacher(teacher, in_context)
        targets = next_tokens(tokens, segment_ids) if targets is None else targets
        check_arrays(Transformer.loss, tokens=tokens, targets=targets)
        x, selection_loss = self._layers(tokens, positions, segment_ids, block_indices, distil)
        has_target = targets >= 0

        def hidden(model: Transformer, x: Float[Array, "B T D"]) -> Float[Array, "B T D"]:
            # The norm has a gradient, too, which NaN of a token without a target would reach.
            return model.final_norm(jnp.where(has_target[..., None], x, 0))

        x, kernel = hidden(self, x), self._output_kernel()
        found = [token_losses(x, kernel, targets)]
        if teacher is not None:
            quiet = nnx.clone(teacher)
            quiet.eval()
            taught = hidden(quiet, quiet._layers(tokens, positions, segment_ids, None, None)[0])
            fixed = jax.lax.stop_gradient((taught, quiet._output_kernel()))
            found.append(token_divergences(x, kernel, *fixed))  # 0 where both are 0, without a target
        if reduce == "mean":
            found = [each.sum() / jnp.maximum(has_target.sum(), 1) for each in found]
        if distil is not None:
            found.insert(1, selection_loss)
        return found[0] if len(found) == 1 else tuple(found)

    def inspect(
        self,
        tokens: Int[Array, "B T"],
        *,
        positions: Int[Array, "B T"] | None = None,
        segment_ids: Int[Array, "B T"] | None = None,
    ) -> list[Selection]:
        """Returns what each NSA layer selects and how it weighs its branches. Dropout is off.

        Args:
          tokens: token ids.
          positions: rotary position of each token, see `__call__`.
          segment_ids: sequence of each token, see `__call__`.

        Returns:
          One `nsa_jax.nn.Selection` for each layer that is "nsa", in their order.

        Raises:
          NotImplementedError: no layer is "nsa".
          ValueError: as in `__call__`.
        """
        of_nsa = [each.attention == "nsa" for each in self.config.per_layer]
        if not any(of_nsa):
            raise NotImplementedError(
                f"inspect needs NSA layers, got attention={self.config.attention!r}. "
                'Build the model with attention="nsa".'
            )
        x, selections = self._embed(tokens), []
        for layer, is_nsa in zip(self.layers, of_nsa, strict=True):
            per_token = dict(positions=positions, segment_ids=segment_ids)
            if is_nsa:
                selections.append(layer.attention.inspect(layer.attention_norm(x), **per_token))
            x, _ = layer(x, positions, segment_ids, deterministic=True)
        return selections

    def init_cache(
        self, batch: int, max_length: int, *, dtype: DType | None = None, step_capacity: int = 8
    ) -> tuple[LayerCache, ...]:
        """Makes empty caches for `prefill` and `decode_step`.

        Args:
          batch: number of rows.
          max_length: most tokens that a row can hold, prompt and new tokens together.
          dtype: dtype of keys and values, see `NSAAttention.init_cache`.
          step_capacity: most tokens that one `decode_step` can append to a row.

        Returns:
          One cache for each layer: an `nsa_jax.cache.NSACache`, or a `DenseCache` if the layer is not "nsa".
        """
        return tuple(
            layer.attention.init_cache(batch, max_length, dtype=dtype, step_capacity=step_capacity)
            for layer in self.layers
        )

    def prefill(
        self,
        tokens: Int[Array, "B T"],
        cache: tuple[LayerCache, ...],
        num_tokens: Int[Array, " B"] | None = None,
        *,
        block_indices: Sequence[Int[Array, "B T K R"]] | None = None,
    ) -> tuple[Float[Array, "B vocab"], tuple[LayerCache, ...]]:
        """Appends a prompt, or a chunk of one, to every row.

        Args:
          tokens: token ids, padded on the right with any ids.
          cache: the caches from `init_cache` or an earlier step.
          num_tokens: how many of the `T` tokens of each row are real, all by default.
          block_indices: a selection for each NSA layer to use instead of choosing one, see `__call__`.

        Returns:
          The logits after the last real token of each row, and the new caches. The logits of a row without
          real tokens are finite and meaningless.

        Raises:
          TypeError: `cache` is not a tuple of caches, or an argument is not an array.
          ValueError: number, shapes or dtypes of the caches do not fit; see also `nsa_jax.cache.prefill` and
            `nsa_jax.cache.dense_prefill`.
          NotImplementedError: `block_indices` are given, and no layer is "nsa".
        """
        self._check_caches(tokens, cache)
        chosen, x, caches = self._of_layers(block_indices), self._embed(tokens, num_tokens), []
        for layer, layer_cache, blocks in zip(self.layers, cache, chosen, strict=True):
            x, layer_cache = layer.prefill(x, layer_cache, num_tokens, blocks)
            caches.append(layer_cache)
        if num_tokens is None:
            last = x[:, -1:]
        else:
            last = jnp.maximum(jnp.asarray(num_tokens, jnp.int32) - 1, 0)  # a uint8 would wrap
            last = jnp.take_along_axis(x, last[:, None, None], axis=1)
        return self._logits(last)[:, 0], tuple(caches)

    def decode_step(
        self,
        tokens: Int[Array, "B T"],
        cache: tuple[LayerCache, ...],
        num_tokens: Int[Array, " B"] | None = None,
        *,
        block_indices: Sequence[Int[Array, "B T K R"]] | None = None,
    ) -> tuple[Float[Array, "B T vocab"], tuple[LayerCache, ...]]:
        """Appends a few tokens to every row.

        Args:
          tokens: token ids, at most `step_capacity` for each row.
          cache: the caches from `init_cache` or an earlier step.
          num_tokens: how many of the `T` tokens of each row are real, all by default. A row with 0 writes
            nothing.
          block_indices: a selection for each NSA layer to use instead of choosing one, see `__call__`.

        Returns:
          The logits after every token, and the new caches.

        Raises:
          TypeError: `cache` is not a tuple of caches, or an argument is not an array.
          ValueError: number, shapes or dtypes of the caches do not fit, or there are too many tokens; see
            also `nsa_jax.cache.decode_step` and `nsa_jax.cache.dense_decode_step`.
          NotImplementedError: `block_indices` are given, and no layer is "nsa".
        """
        self._check_caches(tokens, cache)
        chosen, x, caches = self._of_layers(block_indices), self._embed(tokens, num_tokens), []
        for layer, layer_cache, blocks in zip(self.layers, cache, chosen, strict=True):
            x, layer_cache = layer.decode_step(x, layer_cache, num_tokens, blocks)
            caches.append(layer_cache)
        return self._logits(x), tuple(caches)

    def _layers(
        self,
        tokens: Int[Array, "B T"],
        positions: Int[Array, "B T"] | None,
        segment_ids: Int[Array, "B T"] | None,
        block_indices: Sequence[Int[Array, "B T K R"]] | None,
        distil: Target | None,
    ) -> tuple[Float[Array, "B T D"], Any]:
        """What comes out of the last layer, and the sum of the selection losses."""
        chosen, x = self._of_layers(block_indices), self._embed(tokens)
        of_nsa = [each.attention == "nsa" for each in self.config.per_layer]
        if distil is not None and not any(of_nsa):
            raise NotImplementedError(
                f"distil needs NSA layers, got attention={self.config.attention!r}. Leave it out."
            )
        steps = [
            Step(layer, blocks, distil if is_nsa else None)
            for layer, is_nsa, blocks in zip(self.layers, of_nsa, chosen, strict=True)
        ]
        how: dict[str, Any] = dict(remat=self.config.remat, scan=self.config.scan_layers)
        x, losses = run_layers(steps, x, positions, segment_ids, **how)
        return x, sum(loss.sum() for loss in losses)

    def _of_layers(
        self, block_indices: Sequence[Int[Array, "B T K R"]] | None
    ) -> Sequence[Int[Array, "B T K R"] | None]:
        """The selection of each layer, None for no NSA. Raises unless each NSA layer has one."""
        if block_indices is None:
            return [None] * len(self.layers)
        of_nsa = [each.attention == "nsa" for each in self.config.per_layer]
        if not any(of_nsa):
            raise NotImplementedError(
                f"block_indices need NSA layers, got attention={self.config.attention!r}. Leave them out."
            )
        if not isinstance(block_indices, list | tuple):
            raise TypeError(
                "block_indices of a model must be a list or tuple of one array per NSA layer, got "
                f"{type(block_indices).__name__}. Pass the block_indices of what inspect returns."
            )
        if len(block_indices) != sum(of_nsa):
            raise ValueError(
                f"block_indices of a model must be one array per NSA layer, got {len(block_indices)} for "
                f"{sum(of_nsa)} layers. Pass the block_indices of what inspect returns."
            )
        for blocks in block_indices:
            check_array("block_indices", blocks)
            check_integers(block_indices=blocks)  # before a scan makes one array of all
        given = iter(block_indices)
        return [next(given) if is_nsa else None for is_nsa in of_nsa]

    def _check_caches(self, tokens: Int[Array, "B T"], caches: tuple[LayerCache, ...]) -> None:
        """Raises TypeError or ValueError unless each layer has a cache with as many rows as `tokens`."""
        self._check_tokens(tokens)
        if not isinstance(caches, tuple | list) or isinstance(caches, NSACache | DenseCache):
            raise TypeError(
                f"the cache of a model must be a tuple of one cache per layer, got {type(caches).__name__}. "
                "Pass what the model's init_cache gives."
            )
        if len(caches) != len(self.layers):
            raise ValueError(
                f"the cache of a model must have one cache per layer, got {len(caches)} for "
                f"{len(self.layers)} layers. Pass what the model's init_cache gives."
            )
        for layer, cache in zip(self.layers, caches, strict=True):
            layer.attention.check_cache(cache, tokens.shape[0])

    def _check_teacher(self, teacher: Any, in_context: bool) -> None:
        if teacher is None:
            return
        if not isinstance(teacher, Transformer):
            raise TypeError(f"teacher must be a Transformer, got {type(teacher).__name__}. Pass a model.")
        if teacher.vocab_size != self.vocab_size:
            raise ValueError(
                f"a teacher must have the vocabulary of the model, got {teacher.vocab_size} and "
                f"{self.vocab_size} tokens. Pass the model that this one was made of."
            )
        if in_context:
            raise ValueError(
                "a model with a context_axis must learn without a teacher, got one. Leave it out: the "
                "tokens are not in their order there."
            )

    def _embed(
        self, tokens: Int[Array, "B T"], num_tokens: Int[Array, " B"] | None = None
    ) -> Float[Array, "B T D"]:
        self._check_tokens(tokens)
        check_arrays(Transformer.prefill, tokens=tokens, num_tokens=num_tokens)
        check_ids("tokens", tokens, num_tokens, self.vocab_size)
        x = self.embed(tokens, out_sharding=products.of_tokens(tokens, self.embed.embedding[...]))
        x = x.astype(self.embed.dtype)  # the table is not: see `_promote_table`
        scale = self.config.embedding_scale
        return x if scale is None else x * jnp.asarray(scale, x.dtype)

    def _check_tokens(self, tokens: Int[Array, "B T"]) -> None:
        check_array("tokens", tokens)
        if tokens.ndim != 2 or not jnp.issubdtype(tokens.dtype, jnp.integer):
            raise ValueError(
                f"tokens must be integers of shape [batch, tokens], got {tokens.dtype} of shape "
                f"{tokens.shape}. Add a batch axis, or convert them."
            )

    def _logits(self, x: Float[Array, "B T D"]) -> Float[Array, "B T vocab"]:
        x = self.final_norm(x)
        logits_dtype = jnp.promote_types(x.dtype, jnp.float32)
        kernel, _ = products.columns(x, self._output_kernel().astype(x.dtype))
        return jnp.matmul(x, kernel, preferred_element_type=logits_dtype)

    def _output_kernel(self) -> Float[Array, "D vocab"]:
        return self.embed.embedding[...].T if self.config.tie_embeddings else self.lm_head.kernel[...]


def _promote_table(arrays: Any, /, *, dtype: Any = None, inexact: bool = True) -> Any:
    """The `promote_dtype` of the embedding: tokens are looked up in the parameters as they are stored.

    So the gradients of a token that comes often are added up in their dtype. In bfloat16 a part of them
    would be rounded away, and on a GPU each addition waits for the one before.
    """
    return products.promote_table(arrays, inexact=inexact)
