"""Text generation in one compiled program, and the choice of the next token."""

from nsa_jax.generate.loop import Decoder, Generation, generate
from nsa_jax.generate.sampling import sample, truncate

__all__ = ["Decoder", "Generation", "generate", "sample", "truncate"]
