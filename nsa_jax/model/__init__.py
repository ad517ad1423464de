"""A small decoder-only language model, and its checkpoints."""

from nsa_jax.model.checkpoint import restore, restore_training, save
from nsa_jax.model.config import TransformerConfig
from nsa_jax.model.transformer import Transformer

__all__ = ["Transformer", "TransformerConfig", "restore", "restore_training", "save"]
