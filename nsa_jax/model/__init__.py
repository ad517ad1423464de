"""A small decoder-only language model, and its checkpoints."""

from nsa_jax.model.checkpoint import restore, restore_training, save
from nsa_jax.model.config import TransformerConfig
from nsa_jax.model.token_divergence import token_divergences
from nsa_jax.model.token_loss import next_tokens, token_losses
from nsa_jax.model.transformer import Transformer

__all__ = [
    "Transformer",
    "TransformerConfig",
    "next_tokens",
    "restore",
    "restore_training",
    "save",
    "token_divergences",
    "token_losses",
]
