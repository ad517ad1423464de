"""A tokenizer with a token for each letter, and a small model of its vocabulary, for chats and servers."""

import tokenizers
from modules import abstract, randomised

from nsa_jax.model import Transformer, TransformerConfig

SPECIAL = ["<s>", "<u>", "<a>", "<e>"]
TOKENS = [*"abcdef\n", *SPECIAL]


def make_tokenizer():
    made = tokenizers.Tokenizer(tokenizers.models.BPE({token: n for n, token in enumerate(TOKENS)}, []))
    made.decoder = tokenizers.decoders.Fuse()
    made.add_special_tokens(SPECIAL)
    return made


def make_model():
    sizes = dict(num_layers=1, model_dim=16, num_heads=2, num_kv_heads=1, mlp_dim=16, attention="dense")
    return randomised(abstract(Transformer, TransformerConfig(vocab_size=len(TOKENS), **sizes)), 0.5, seed=4)
