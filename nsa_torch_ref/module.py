"""Layers with the same parameter names and shapes as those of `nsa_jax.nn`. Kernels are `[in, out]`."""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from nsa_torch_ref import attention, distillation, indexer, masks
from nsa_torch_ref.masks import NSAConfig
from nsa_torch_ref.rotary import rotate


def random_kernel(*shape: int, fan_in: int) -> nn.Parameter:
    """A kernel from the normal distribution with variance `1 / fan_in`."""
    return nn.Parameter(torch.randn(shape) * fan_in**-0.5)


class Projection(nn.Module):
    """Product of `[B, T, *in]` with a kernel `[*in, *out]`, plus an optional bias `[*out]`."""

    def __init__(self, in_shape: tuple[int, ...], out_shape: tuple[int, ...], use_bias: bool):
        super().__init__()
        fan_in = torch.Size(in_shape).numel()
        self.in_rank = len(in_shape)
        self.kernel = random_kernel(*in_shape, *out_shape, fan_in=fan_in)
        self.bias = nn.Parameter(torch.zeros(out_shape)) if use_bias else None

    def forward(self, x: Tensor) -> Tensor:
        """Contracts the last axes of x with the kernel."""
        y = torch.tensordot(x, self.kernel, dims=self.in_rank)
        return y if self.bias is None else y + self.bias


def block_tokens(x: Tensor, segment_ids: Tensor, config: NSAConfig) -> Tensor:
    """The tokens `[B, C, l, K, H]` of each block of x `[B, S, K, H]`; arbitrary tokens in unused slots."""
    within = torch.arange(config.compression_block_size, device=x.device)
    row = torch.arange(x.shape[0], device=x.device)[:, None, None]
    return x[row, masks.compression_starts(segment_ids, config).clamp(min=0)[:, :, None] + within]


class Compressor(nn.Module):
    """The compression phi of Eq. 7: maps the un-rotated tokens of blocks to one vector for each block.

    Mode "mean" averages the l tokens of a block. Mode "mlp" adds to the mean an MLP of the tokens with an
    intra-block position embedding. The KV heads share the MLP; its output kernel starts at zero.
    """

    def __init__(self, head_dim: int, config: NSAConfig, mode: str = "mlp", hidden_dim: int | None = None):
        super().__init__()
        if mode not in ("mlp", "mean"):
            raise ValueError(f'compression must be "mlp" or "mean", got {mode!r}. Choose one of the two.')
        self.config, self.mode = config, mode
        if mode == "mlp":
            size, hidden = config.compression_block_size, 2 * head_dim if hidden_dim is None else hidden_dim
            self.position_embedding = nn.Parameter(0.02 * torch.randn(size, head_dim))
            self.kernel_in = random_kernel(size * head_dim, hidden, fan_in=size * head_dim)
            self.bias_in = nn.Parameter(torch.zeros(hidden))
            self.kernel_out = nn.Parameter(torch.zeros(hidden, head_dim))
            self.bias_out = nn.Parameter(torch.zeros(head_dim))

    def forward(self, blocks: Tensor) -> Tensor:
        """Compresses blocks `[B, m, l, K, H]` to `[B, m, K, H]`."""
        mean = blocks.mean(dim=2)
        if self.mode == "mean":
            return mean
        tokens = blocks.transpose(2, 3) + self.position_embedding  # [B, m, K, l, H]
        hidden = tokens.flatten(3) @ self.kernel_in + self.bias_in
        return mean + functional.gelu(hidden, approximate="tanh") @ self.kernel_out + self.bias_out


class Gate(nn.Module):
    """A small MLP that computes sigmoid gates from the layer input."""

    def __init__(
        self,
        in_features: int,
        num_heads: int,
        hidden_dim: int | None = None,
        num_branches: int = 3,
        initial_gates: Sequence[float] | None = None,
    ):
        super().__init__()
        hidden = max(8, in_features // 4) if hidden_dim is None else hidden_dim
        self.kernel_in = random_kernel(in_features, hidden, fan_in=in_features)
        self.bias_in = nn.Parameter(torch.zeros(hidden))
        self.kernel_out = random_kernel(hidden, num_heads, num_branches, fan_in=hidden)
        self.bias_out = nn.Parameter(torch.zeros(num_heads, num_branches))
        if initial_gates is not None:
            self.kernel_out.data.zero_()
            self.bias_out.data += torch.tensor(initial_gates, dtype=torch.float64).logit()

    def forward(self, x: Tensor) -> Tensor:
        """Computes the gates `[B, T, N, P]` of the branches from the layer input `[B, T, D]`."""
        hidden = functional.silu(x @ self.kernel_in + self.bias_in)
        return (torch.tensordot(hidden, self.kernel_out, dims=1) + self.bias_out).sigmoid()


class HeadNorm(nn.Module):
    """RMSNorm (arXiv:1910.07467) over the last axis, with a learned scale."""

    def __init__(self, width: int, epsilon: float = 1e-6):
        super().__init__()
        self.scale, self.epsilon = nn.Parameter(torch.ones(width)), epsilon

    def forward(self, x: Tensor) -> Tensor:
        """Divides by the root of the mean square of the last axis plus epsilon, times the scale."""
        wide = x.to(attention.accumulation_dtype(x.dtype))
        return (wide / (wide.square().mean(dim=-1, keepdim=True) + self.epsilon).sqrt() * self.scale).to(
            x.dtype
        )


@dataclasses.dataclass(frozen=True, kw_only=True)
class IndexerConfig:
    """The options of an `Indexer`. Any object with these attributes can take its place.

    Attributes:
      num_heads: `J`, index heads of each KV head.
      dim: `E`, width of index queries and keys.
      weighted: whether a token scores a weighted sum over its index heads, see `block_scores`.
      normalize: whether index queries and keys pass an RMSNorm each before rotation.
      shared_key: whether one index key serves all KV heads; else each has its own.
      slow_pairs: whether index heads are rotated as the slower half of heads twice as wide.
    """

    num_heads: int = 1
    dim: int = 128
    weighted: bool = False
    normalize: bool = False
    shared_key: bool = True
    slow_pairs: bool = False


class Indexer(nn.Module):
    """Projects the layer input to what scores the blocks."""

    def __init__(
        self, in_features: int, num_kv_heads: int, options: IndexerConfig, rotary: Callable[..., Tensor]
    ):
        super().__init__()
        heads = (num_kv_heads, options.num_heads)
        self.rotary, self.slow_pairs = rotary, options.slow_pairs
        self.query_proj = Projection((in_features,), (*heads, options.dim), False)
        key_heads = 1 if options.shared_key else num_kv_heads
        self.key_proj = Projection((in_features,), (key_heads, options.dim), False)
        self.weight_proj = Projection((in_features,), heads, False) if options.weighted else None
        self.query_norm = HeadNorm(options.dim) if options.normalize else nn.Identity()
        self.key_norm = HeadNorm(options.dim) if options.normalize else nn.Identity()

    def forward(self, x: Tensor, positions: Tensor) -> tuple[Tensor, Tensor, Tensor | None]:
        """Index queries `[B, S, K, J, E]` and keys `[B, S, I, E]`, rotated, and weights `[B, S, K, J]`."""
        query = self.query_norm(self.query_proj(x))
        query = self.rotated(query.flatten(2, 3), positions).view_as(query)
        key = self.rotated(self.key_norm(self.key_proj(x)), positions)
        return query, key, None if self.weight_proj is None else self.weight_proj(x)

    def rotated(self, heads: Tensor, positions: Tensor) -> Tensor:
        """Heads `[B, S, N, E]`, rotated, if not whole then as the slower pairs of heads twice as wide."""
        if not self.slow_pairs:
            return self.rotary(heads, positions)
        first, second = heads.chunk(2, dim=-1)
        zeros = torch.zeros_like(first)
        wide = self.rotary(torch.cat([zeros, first, zeros, second], dim=-1), positions)
        _, first, _, second = wide.chunk(4, dim=-1)
        return torch.cat([first, second], dim=-1)


class NSAAttention(nn.Module):
    """Self-attention layer with Native Sparse Attention. Its options are those of `nsa_jax.nn.NSAAttention`.

    * `rotary(heads, positions)` rotates queries, keys and compressed keys; by default it is `rotate` with
      `rope_base` and `rope_scaling`.
    * `normalize_qk` normalises queries and the keys of tokens, before rotation and compression.
    * Dropout is applied to the output, in training.
    * `branches` names some of "cmp", "slc" and "win", "slc" among them. Several branches have gates.
    * `selector` is "importance" or an `IndexerConfig`.
    * `compressor(head_dim, config)` makes phi, once for keys and once for values, and
      `gate(in_features, num_heads)` makes the gate, like the classes of this module.
    * With `share_keys_values`, one pair of projections serves all branches.
    * `initial_gates` are what the gates of `Gate` are at first.
    * `out_bias` says whether the output projection has a bias, if not what `use_bias` says.
    """

    def __init__(
        self,
        num_heads: int,
        in_features: int,
        *,
        num_kv_heads: int,
        head_dim: int | None = None,
        value_dim: int | None = None,
        config: NSAConfig,
        branches: Sequence[str] = ("cmp", "slc", "win"),
        selector: Any = "importance",
        share_keys_values: bool = False,
        compression: str = "mlp",
        compressor: Callable[..., Callable[[Tensor], Tensor]] | None = None,
        gate: Callable[..., Callable[[Tensor], Tensor]] | None = None,
        initial_gates: Sequence[float] | None = None,
        use_bias: bool = False,
        out_bias: bool | None = None,
        normalize_qk: bool = False,
        norm_epsilon: float = 1e-6,
        scale: float | None = None,
        dropout_rate: float = 0.0,
        rope_base: float = 10000.0,
        rope_scaling: Any = None,
        rotary: Callable[[Tensor, Tensor], Tensor] | None = None,
    ):
        super().__init__()
        if selector == "importance" and "cmp" not in branches:
            raise ValueError(
                "selection by importance needs the compressed branch, got branches="
                f"{tuple(branches)}. Pass selector=IndexerConfig()."
            )
        head_dim = in_features // num_heads if head_dim is None else head_dim
        value_dim = head_dim if value_dim is None else value_dim
        self.config, self.scale = config, scale
        self.rotary = rotary or functools.partial(rotate, base=rope_base, scaling=rope_scaling)
        self.query_proj = Projection((in_features,), (num_heads, head_dim), use_bias)
        norm = functools.partial(HeadNorm, head_dim, norm_epsilon) if normalize_qk else nn.Identity
        self.query_norm = norm()
        self.branches = tuple(branch for branch in ("cmp", "slc", "win") if branch in branches)
        self.pair_of = {branch: "" if share_keys_values else f"_{branch}" for branch in self.branches}
        for pair in dict.fromkeys(self.pair_of.values()):
            for kind, width in (("key", head_dim), ("value", value_dim)):
                projection = Projection((in_features,), (num_kv_heads, width), use_bias)
                setattr(self, f"{kind}{pair}_proj", projection)
            setattr(self, f"key{pair}_norm", norm())
        out_bias = use_bias if out_bias is None else out_bias
        self.out_proj = Projection((num_heads, value_dim), (in_features,), out_bias)
        self.dropout = nn.Dropout(dropout_rate)
        if "cmp" in self.branches:
            compressor = compressor or functools.partial(Compressor, mode=compression)
            self.compressor_key = compressor(head_dim, config)
            self.compressor_value = compressor(value_dim, config)
        if len(self.branches) > 1:
            gate = gate or functools.partial(
                Gate, num_branches=len(self.branches), initial_gates=initial_gates
            )
            self.gate = gate(in_features, num_heads)
        self.selector = None
        if selector != "importance":
            self.selector = Indexer(in_features, num_kv_heads, selector, self.rotary)

    def places(
        self, x: Tensor, segment_ids: Tensor | None, positions: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        """Fills in the defaults: one sequence per row, and the index of each token in its sequence."""
        if segment_ids is None:
            segment_ids = torch.ones(x.shape[:2], dtype=torch.long, device=x.device)
        segment_ids = segment_ids.long()
        if positions is None:
            positions = torch.arange(x.shape[1], device=x.device) - masks.sequence_starts(segment_ids)
        return segment_ids, positions

    def operands(
        self,
        x: Tensor,
        segment_ids: Tensor | None = None,
        positions: Tensor | None = None,
        queries: int | None = None,
    ) -> tuple[Any, ...]:
        """The tensor arguments of `native_sparse_attention`, for the last `queries` tokens of x or for all.

        `positions` `[B, S]` affect only the rotation. The default is the index of a token in its sequence.
        """
        segment_ids, positions = self.places(x, segment_ids, positions)
        asking = slice(x.shape[1] - queries if queries is not None else 0, None)
        query = self.rotary(self.query_norm(self.query_proj(x[:, asking])), positions[:, asking])
        tokens = {pair: self.key_and_value(pair, x) for pair in dict.fromkeys(self.pair_of.values())}
        pairs: dict[str, Any] = dict.fromkeys(("cmp", "slc", "win"), (None, None))
        for branch in self.branches:
            key, value = tokens[self.pair_of[branch]]
            if branch == "cmp":
                value = self.compressor_value(block_tokens(value, segment_ids, self.config))
                pairs[branch] = self.compressed_keys(key, segment_ids, positions), value
            else:
                pairs[branch] = self.rotary(key, positions), value
        gates = self.gate(x[:, asking]) if len(self.branches) > 1 else None
        return query, *pairs["cmp"], *pairs["slc"], *pairs["win"], gates

    def key_and_value(self, pair: str, x: Tensor) -> tuple[Tensor, Tensor]:
        """Keys `[B, S, K, H]` of a branch, normalised and not rotated, and its values `[B, S, K, V]`."""
        key = getattr(self, f"key{pair}_norm")(getattr(self, f"key{pair}_proj")(x))
        return key, getattr(self, f"value{pair}_proj")(x)

    def compressed_keys(self, key: Tensor, segment_ids: Tensor, positions: Tensor) -> Tensor:
        """Keys of blocks `[B, C, K, H]` from those of tokens, rotated as the first token of each block."""
        starts = masks.at(positions, masks.compression_starts(segment_ids, self.config), 0)
        return self.rotary(self.compressor_key(block_tokens(key, segment_ids, self.config)), starts)

    def block_scores(
        self,
        x: Tensor,
        segment_ids: Tensor | None = None,
        positions: Tensor | None = None,
        queries: int | None = None,
    ) -> Tensor:
        """What the blocks are ranked by, `[B, T, K, M]`. Those of an indexer have a gradient for it alone."""
        segment_ids, positions = self.places(x, segment_ids, positions)
        where = dict(config=self.config, segment_ids=segment_ids)
        if self.selector is None:
            query, key_cmp, *_ = self.operands(x, segment_ids, positions, queries)
            return attention.importance_scores(query, key_cmp, scale=self.scale, **where)
        asking = slice(x.shape[1] - queries if queries is not None else 0, None)
        query, key, weights = self.selector(x.detach(), positions)
        weights = None if weights is None else weights[:, asking]
        return indexer.block_scores(query[:, asking], key, weights=weights, **where)

    def taught_scores(
        self, x: Tensor, query: Tensor, segment_ids: Tensor, positions: Tensor, at: Tensor
    ) -> Tensor:
        """Scores `[B, T, K, M]` of queries at row indices `at`, with a gradient for what learns alone.

        Their softmax over the blocks in sight are the shares that the selection gives. An indexer has its
        block scores, importance its logarithm, at least that of the smallest normal number.
        """
        if self.selector is not None:
            return self.block_scores(x, segment_ids, positions, query.shape[1])
        key, _ = self.key_and_value(self.pair_of["cmp"], x)
        key_cmp = self.compressed_keys(key.detach(), segment_ids, positions)
        importance = attention.importance_scores(
            query.detach(), key_cmp, config=self.config, segment_ids=segment_ids, scale=self.scale
        )
        candidate, _ = masks.block_kinds(segment_ids, at, self.config)
        scores = importance.clamp(min=torch.finfo(importance.dtype).tiny).log()
        return scores.masked_fill(~candidate[:, :, None], -torch.inf)

    def forward(
        self,
        x: Tensor,
        *,
        segment_ids: Tensor | None = None,
        positions: Tensor | None = None,
        block_indices: Tensor | None = None,
        queries: int | None = None,
        distil: str | None = None,
    ) -> Any:
        """The layer output `[B, T, D]` for the last `queries` tokens of x `[B, S, D]`, all by default.

        With `distil` "dense" or "selected", the pair of it and the mean selection loss: with the
        probabilities of dense attention, or of the selected branch, as the target. Blocks that are always
        selected do not count. It teaches the indexer or, with importance, the compressor of keys.
        """
        segment_ids, positions = self.places(x, segment_ids, positions)
        operands = self.operands(x, segment_ids, positions, queries)
        where = dict(config=self.config, segment_ids=segment_ids, scale=self.scale)
        _, at = attention.place_queries(operands[0], x.shape[1], segment_ids, None)
        if block_indices is None:
            scores = self.block_scores(x, segment_ids, positions, queries)
            block_indices = masks.top_blocks(scores.detach(), segment_ids, at, self.config)
        out = attention.native_sparse_attention(*operands, block_indices=block_indices, **where)
        out = self.dropout(self.out_proj(out))
        if distil is None:
            return out
        query, key = operands[0].detach(), operands[3].detach()
        _, forced = masks.block_kinds(segment_ids, at, self.config)
        scores = self.taught_scores(x, query, segment_ids, positions, at)
        scores = scores.masked_fill(forced[:, :, None], -torch.inf)
        if distil == "dense":
            target = distillation.block_probabilities(query, key, **where)
        else:
            target = distillation.selected_probabilities(query, key, block_indices, **where)
            scores = masks.at_slots(scores, block_indices, -torch.inf)
        real = segment_ids[:, -query.shape[1] :] != 0
        loss = distillation.selection_loss(scores, target)[real]
        return out, loss.sum() / max(loss.numel(), 1)

    def decode(self, x: Tensor, prompt_length: int = 0) -> Tensor:
        """The outputs from token `prompt_length` on, each computed from its whole prefix, without a cache."""
        steps = [self(x[:, : t + 1], queries=1) for t in range(prompt_length, x.shape[1])]
        return torch.cat(steps, dim=1)
