"""The parameters of a dense `Transformer` under the names and in the shapes of Hugging Face."""

import math
from collections.abc import Iterable
from typing import NamedTuple

import numpy as np

from nsa_jax.model import TransformerConfig

# Our names of a layer's norms, and those of others before `_layernorm`.
_NORMS = dict(attention_norm="input", mlp_norm="post_attention")
_GEMMA_NORMS = dict(
    attention_norm="input", attention_post_norm="post_attention", mlp_norm="pre_feedforward",
    mlp_post_norm="post_feedforward",
)  # fmt: skip


class Place(NamedTuple):
    """Where a parameter is stored.

    Attributes:
      name: its name there.
      shape: its shape there. That of a kernel is `[out, in]`.
      own_shape: its shape here. That of a kernel is `[*in, *out]`.
      transposed: whether it is a kernel.
      less: what was subtracted from it there.
    """

    name: str
    shape: tuple[int, ...]
    own_shape: tuple[int, ...]
    transposed: bool = False
    less: float = 0.0

    def fill(self, own: np.ndarray, parts: Iterable[np.ndarray]) -> None:
        """Writes into the parameter what is stored: all of it, or some rows after the others."""
        stored, row = self._as_stored(own), 0
        for part in parts:
            if self.less:  # in float64, so that the sum is rounded once
                part = part.astype(np.float64) + self.less
            stored[row : row + len(part)] = part
            row += len(part)

    def stored(self, own: np.ndarray) -> np.ndarray:
        """The tensor to store, of the parameter."""
        if self.less:
            own = (own.astype(np.float64) - self.less).astype(own.dtype)
        return self._as_stored(own)

    def _as_stored(self, own: np.ndarray) -> np.ndarray:
        """A view in the shape of the stored tensor."""
        return own.reshape(self.shape[::-1]).T if self.transposed else own.reshape(self.shape)


def places(config: TransformerConfig) -> dict[str, Place]:
    """The place of each parameter of a dense model, by its name here."""
    width, inner = config.model_dim, config.mlp_width
    found = {"embed.embedding": _plain("model.embed_tokens.weight", config.vocab_size, width)}
    for number in range(config.num_layers):
        layer = _attention(config) | {
            f"{own}.scale": _plain(f"{name}_layernorm.weight", width)
            for own, name in (_GEMMA_NORMS if config.post_norms else _NORMS).items()
        }
        layer |= {
            "mlp.gate_proj.kernel": _kernel("mlp.gate_proj.weight", (width,), (inner,)),
            "mlp.up_proj.kernel": _kernel("mlp.up_proj.weight", (width,), (inner,)),
            "mlp.down_proj.kernel": _kernel("mlp.down_proj.weight", (inner,), (width,)),
        }
        for own, place in layer.items():
            found[f"layers.{number}.{own}"] = place._replace(name=f"model.layers.{number}.{place.name}")
    found["final_norm.scale"] = _plain("model.norm.weight", width)
    if not config.tie_embeddings:
        found["lm_head.kernel"] = _kernel("lm_head.weight", (width,), (config.vocab_size,))
    less = float(config.post_norms)  # as Gemma 3 stores its norms
    return {
        own: place._replace(less=less) if own.endswith("norm.scale") else place
        for own, place in found.items()
    }


def _attention(config: TransformerConfig) -> dict[str, Place]:
    width, dim = config.model_dim, config.head_width
    heads = dict(query=config.num_heads, key=config.num_kv_heads, value=config.num_kv_heads)
    found = {}
    for name, number in heads.items():
        of, out = f"self_attn.{name[0]}_proj", (number, dim)
        found[f"attention.{name}_proj.kernel"] = _kernel(f"{of}.weight", (width,), out)
        if config.qkv_bias:
            found[f"attention.{name}_proj.bias"] = Place(f"{of}.bias", (math.prod(out),), out)
        if config.normalize_qk and name != "value":
            found[f"attention.{name}_norm.scale"] = _plain(f"self_attn.{name[0]}_norm.weight", dim)
    found["attention.out_proj.kernel"] = _kernel("self_attn.o_proj.weight", (config.num_heads, dim), (width,))
    if config.out_bias:
        found["attention.out_proj.bias"] = _plain("self_attn.o_proj.bias", width)
    return found


def _plain(name: str, *shape: int) -> Place:
    return Place(name, shape, shape)


def _kernel(name: str, into: tuple[int, ...], out: tuple[int, ...]) -> Place:
    return Place(name, (math.prod(out), math.prod(into)), (*into, *out), transposed=True)
