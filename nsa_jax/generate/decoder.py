"""What text is written with: the methods of a model."""

from typing import Any, Protocol

from nsa_jax.array_typing import Array, Int


class Decoder(Protocol):
    """The methods that `generate` and sessions need of a model, such as `nsa_jax.model.Transformer`.

    The model must also be an `nnx.Module`. `num_tokens` is passed by its name, all other arguments by
    position. If the model has an int `vocab_size`, ids outside it are refused where the host has their
    values, and end their row with `Ended.NOT_FINITE` elsewhere. Its `init_cache` is given a keyword `dtype`
    where a caller asks for a `cache_dtype`.
    """

    def init_cache(self, batch: int, max_length: int) -> Any:
        """Makes an empty cache for `batch` rows of at most `max_length` tokens."""

    def prefill(
        self, tokens: Int[Array, "B T"], cache: Any, num_tokens: Int[Array, " B"]
    ) -> tuple[Array, Any]:
        """Appends prompts; returns the logits `[B, vocab]` after the last real token, and the cache."""

    def decode_step(
        self, tokens: Int[Array, "B 1"], cache: Any, num_tokens: Int[Array, " B"]
    ) -> tuple[Array, Any]:
        """Appends a token to the rows with `num_tokens` 1; returns logits `[B, 1, vocab]` and the cache.

        Drafts and `rewind` need steps of up to 8 tokens, of which `num_tokens` are real, and logits of each.
        """
