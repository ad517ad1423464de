"""Text generation in one compiled program or in a session, and the choice of the next token."""

from nsa_jax.generate.batching import Batcher
from nsa_jax.generate.copies import gather, repeat
from nsa_jax.generate.decoder import Decoder
from nsa_jax.generate.drafts import DraftModel, LookUp
from nsa_jax.generate.ends import Ended
from nsa_jax.generate.going_back import Checkpoint, checkpoint, rewind, rewind_to
from nsa_jax.generate.logprobs import Logprobs
from nsa_jax.generate.loop import Generation, generate
from nsa_jax.generate.prepared import prepare
from nsa_jax.generate.requests import Prefix, Request, Written
from nsa_jax.generate.sampling import sample, truncate
from nsa_jax.generate.session import Continuation, Session, advance, extend, start
from nsa_jax.generate.streaming import Piece, Stream, stream
from nsa_jax.generate.text import Tokenizer

__all__ = [
    "Batcher",
    "Checkpoint",
    "Continuation",
    "Decoder",
    "DraftModel",
    "Ended",
    "Generation",
    "Logprobs",
    "LookUp",
    "Piece",
    "Prefix",
    "Request",
    "Session",
    "Stream",
    "Tokenizer",
    "Written",
    "advance",
    "checkpoint",
    "extend",
    "gather",
    "generate",
    "prepare",
    "repeat",
    "rewind",
    "rewind_to",
    "sample",
    "start",
    "stream",
    "truncate",
]
