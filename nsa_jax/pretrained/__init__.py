"""From a dense model of others to NSA: loads it, converts it, compares the two, and saves either."""

from nsa_jax.pretrained.chat_format import ChatFormat, load_chat_format
from nsa_jax.pretrained.comparison import Comparison, compare
from nsa_jax.pretrained.conversion import to_nsa
from nsa_jax.pretrained.loading import load
from nsa_jax.pretrained.saving import save

__all__ = ["ChatFormat", "Comparison", "compare", "load", "load_chat_format", "save", "to_nsa"]
