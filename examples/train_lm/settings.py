"""The settings of a run: everything that decides its numbers."""

import dataclasses
from typing import Any, Literal

from flax import nnx

from benchmarks.command_line import InputError
from examples.train_lm.mesh import ONE_DEVICE, MeshSizes
from nsa_jax.config import NSAConfig
from nsa_jax.model import Transformer, TransformerConfig

BYTES = 256

# A query reads at most n l' + w = 6 * 32 + 64 = 256 selected and recent tokens: a quarter of 1024.
NSA = NSAConfig(
    compression_block_size=16,
    compression_stride=8,
    selection_block_size=32,
    num_selected_blocks=6,
    window_size=64,
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Settings:
    """Model, data order and schedule of one run.

    Attributes:
      attention: "nsa" or "dense".
      steps: optimizer steps.
      batch: sequences a step.
      length: bytes of a sequence.
      seed: of the parameters, the data order and the sampling.
      learning_rate: peak of AdamW's learning rate.
      warmup: steps of its linear rise; it then falls to a tenth along a cosine.
      layers: decoder layers.
      width: width of the residual stream.
      heads: query heads.
      kv_heads: KV heads.
      nsa: block structure.

    Raises:
      InputError: a value is out of range, or the values do not make a model.
    """

    attention: Literal["nsa", "dense"] = "nsa"
    steps: int = 600
    batch: int = 2
    length: int = 1024
    seed: int = 0
    learning_rate: float = 3e-3
    warmup: int = 60
    layers: int = 3
    width: int = 128
    heads: int = 2
    kv_heads: int = 1
    nsa: NSAConfig = NSA

    def __post_init__(self):
        for name in ("steps", "batch", "length", "layers", "width", "heads", "kv_heads"):
            if getattr(self, name) < 1:
                raise InputError(
                    f"--{name.replace('_', '-')} must be at least 1, got {getattr(self, name)}. "
                    "Pass a positive number."
                )
        for name, parts in (("width", "heads"), ("heads", "kv_heads")):
            whole, number = getattr(self, name), getattr(self, parts)
            if whole % number:
                raise InputError(
                    f"--{parts.replace('_', '-')} must divide --{name}, got {number} and {whole}. "
                    "Pass another number."
                )
        for name in ("seed", "warmup"):
            if getattr(self, name) < 0:
                raise InputError(f"--{name} must be at least 0, got {getattr(self, name)}. Pass 0 or more.")
        if self.seed >= 2**32:
            raise InputError(f"--seed must be below 2**32, got {self.seed}. Pass a smaller one.")
        if not 0 < self.learning_rate < float("inf"):
            raise InputError(
                f"--learning-rate must be above 0 and finite, "
                f"got {self.learning_rate}. Pass for example 3e-3."
            )
        if self.attention not in ("nsa", "dense"):
            raise InputError(
                f"--attention must be nsa or dense, got {self.attention!r}. Choose one of the two."
            )
        try:
            self.abstract_model()
        except ValueError as error:
            raise InputError(f"the sizes must make a model, got one that cannot be: {error}") from error

    @property
    def model(self) -> TransformerConfig:
        """The configuration of the model."""
        return TransformerConfig(
            vocab_size=BYTES,
            num_layers=self.layers,
            model_dim=self.width,
            num_heads=self.heads,
            num_kv_heads=self.kv_heads,
            attention=self.attention,
            nsa=self.nsa,
        )

    def new_model(self, mesh: MeshSizes = ONE_DEVICE) -> Transformer:
        """The model before its first step, on the devices of the mesh in context."""
        # One program instead of one for each parameter, which takes longer to compile.
        return nnx.jit(lambda: self._make(mesh))()

    def abstract_model(self, mesh: MeshSizes = ONE_DEVICE) -> Transformer:
        """The shapes of `new_model`, and where its parameters lie, without the numbers."""
        model = nnx.eval_shape(lambda: self._make(mesh))
        return model if mesh == ONE_DEVICE else nnx.as_abstract(model)

    def _make(self, mesh: MeshSizes) -> Transformer:
        return Transformer(self.model, rngs=nnx.Rngs(self.seed), **mesh.arguments)

    def sparsity(self) -> str:
        """How much of a sequence one query reads, in words."""
        if self.attention == "dense":
            return f"dense attention: a query reads all of up to {self.length} tokens"
        nsa = self.nsa
        most = nsa.num_selected_blocks * nsa.selection_block_size + nsa.window_size
        return (
            f"sparse attention: n l' + w = {nsa.num_selected_blocks} * {nsa.selection_block_size} + "
            f"{nsa.window_size} = {most} of {self.length} tokens ({most / self.length:.0%})"
        )

    def to_json(self) -> dict[str, Any]:
        """Plain values, as a run's records hold them."""
        return dataclasses.asdict(self)
