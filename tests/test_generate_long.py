"""Ten thousand tokens by `generate`, across edges of blocks and windows, against one forward of the text."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from modules import abstract, randomised

from nsa_jax.config import NSAConfig
from nsa_jax.generate import generate, sample
from nsa_jax.model import Transformer, TransformerConfig

NEW, PROMPT = 10_000, 37
# 5,000 compression blocks, 1,250 selection blocks; the rings, of 13 and 16 tokens, go around some 700 times.
NSA = NSAConfig(
    compression_block_size=6, compression_stride=2, selection_block_size=8, num_selected_blocks=4,
    window_size=9,
)  # fmt: skip
CONFIG = TransformerConfig(
    vocab_size=29, num_layers=1, model_dim=8, num_heads=2, num_kv_heads=1, mlp_dim=8, nsa=NSA,
    tie_embeddings=False, dtype="float64", param_dtype="float64",
)  # fmt: skip


@pytest.mark.slow
def test_ten_thousand_tokens_are_those_of_one_forward():
    """Each is the one that `sample` draws, with its key, from the logits of one forward of the whole text.

    In float64 the two ways to compute the logits differ by about 1e-13, and no draw is that close. The text
    is sampled because greedy text of a random model falls into a cycle.
    """
    with jax.enable_x64(True):
        model = randomised(abstract(Transformer, CONFIG, implementation="xla"), 2.0)
        prompt = np.random.default_rng(0).integers(0, 29, (1, PROMPT))
        keys = jax.random.split(jax.random.key(0), 1)

        written = generate(model, prompt, max_new_tokens=NEW, temperature=5.0, key=keys, chunk_size=64)

        new = np.asarray(written.tokens[0])
        text = np.concatenate([prompt[0], new])[None]
        logits = nnx.jit(lambda model, text: model(text))(model, text)[0, PROMPT - 1 : -1]
        drawn_with = jax.vmap(jax.random.fold_in, (None, 0))(keys[0], jnp.arange(NEW))
        expected = np.asarray(sample(logits, drawn_with, temperature=5.0))

    assert np.flatnonzero(new != expected).tolist() == []
    assert len(set(zip(new, new[1:], new[2:], strict=False))) > 2000  # the text is no cycle
