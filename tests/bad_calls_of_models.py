"""Good calls of models, and of what generates with them."""

import numpy as np
from bad_calls import (
    CONFIG,
    KEYS,
    MODEL,
    MODEL_HELD,
    ROOM,
    TRANSFORMER,
    VOCAB,
    B,
    Call,
    D,
    H,
    K,
    N,
    T,
    floats,
    ints,
    made,
    method,
)
from bad_calls_of_caches import NEW, ROWS
from bad_calls_of_layers import OPTIONAL_FUNCTION, PER_TOKEN, RATE
from bad_values import (
    NO_FLOAT,
    NO_INT,
    Counts,
    DType,
    Flag,
    Floats,
    FreeName,
    Given,
    Name,
    Of,
    Real,
    Scale,
    Sharding,
    Whole,
)
from flax import nnx

from nsa_jax import generate, model

SHARE = Given(True, NO_FLOAT | {"negative": -0.1, "0": 0.0, "above 1": 1.5, "10^400": 10**400})
TOO_HOT = NO_FLOAT | {"negative": -1.0, "10^400": 10**400, "1e300": 1e300}
IDS = (ints(B, T, below=VOCAB), Counts(axes="BT", free="BT", low=0, high=VOCAB - 1))
IDS_OF_MANY = (IDS[0], Counts(axes="BT", low=0, high=VOCAB - 1))
NEW_IDS = (ints(B, NEW, below=VOCAB), Counts(axes="BT", free="T", low=0, high=VOCAB - 1))
ALL_NEW = np.full(B, NEW, np.int32)
MODELS = {
    "TransformerConfig": Call(
        model.TransformerConfig,
        dict(
            vocab_size=(VOCAB, Whole()),
            num_layers=(1, Whole()),
            model_dim=(D, Whole()),
            num_heads=(N, Whole()),
            num_kv_heads=(K, Whole()),
            head_dim=(H, Whole(optional=True)),
            mlp_dim=(8, Whole(optional=True)),
            attention=("nsa", Name()),
            nsa=(CONFIG, Of()),
            share_keys_values=(False, Flag()),
            compression=("mlp", Name()),
            compressor=OPTIONAL_FUNCTION,
            gate=OPTIONAL_FUNCTION,
            normalize_qk=(False, Flag()),
            scale=(None, Scale(optional=True)),
            dropout_rate=(0.5, RATE),
            rope_base=(10000.0, Real()),
            rope_scaling=(None, Of(optional=True)),
            rotary=OPTIONAL_FUNCTION,
            tie_embeddings=(True, Flag()),
            dtype=("float32", DType()),
            param_dtype=("float32", DType()),
            remat=(False, Flag()),
        ),
    ),
    "Transformer": Call(
        made(model.Transformer),
        dict(
            config=(model.TransformerConfig(**MODEL), Of()),
            sharding=(None, Sharding(optional=True)),
            context_axis=(None, FreeName(optional=True)),
            context_order=("zigzag", Name()),
            implementation=("xla", Name(optional=True)),
            rngs=(nnx.Rngs(0), Of()),
        ),
    ),
    "Transformer()": Call(method(TRANSFORMER, "__call__"), dict(tokens=IDS_OF_MANY) | PER_TOKEN),
    "Transformer.inspect": Call(method(TRANSFORMER, "inspect"), dict(tokens=IDS_OF_MANY) | PER_TOKEN),
    "Transformer.init_cache": Call(method(TRANSFORMER, "init_cache"), ROWS),
    "Transformer.prefill": Call(
        method(TRANSFORMER, "prefill"),
        dict(tokens=NEW_IDS, cache=(MODEL_HELD, Of()), num_tokens=(ALL_NEW, Counts(True, "B", high=NEW))),
    ),
    "Transformer.decode_step": Call(
        method(TRANSFORMER, "decode_step"),
        dict(tokens=NEW_IDS, cache=(MODEL_HELD, Of()), num_tokens=(ALL_NEW, Counts(True, "B", high=NEW))),
    ),
    "generate": Call(
        lambda **given: generate.generate(TRANSFORMER() if given.pop("own", True) else 0, **given),
        dict(
            prompts=(IDS[0], Counts(axes="BT", free="T", low=0, high=VOCAB - 1)),
            lengths=(np.full(B, T, np.int32), Counts(True, "B", low=1, high=T)),
            max_new_tokens=(2, Whole()),
            max_length=(ROOM, Whole(optional=True)),
            temperature=(1.0, Given(refused=TOO_HOT)),
            top_k=(3, Whole(optional=True)),
            top_p=(0.5, SHARE),
            eos_id=(1, Whole(True, low=0)),
            pad_id=(0, Whole(low=None)),
            key=(
                0,
                Given(
                    refused=NO_INT | {"2^64": 2**64, "keys": KEYS[:1], "raw key": np.zeros((B, 2), np.uint32)}
                ),
            ),
            chunk_size=(8, Whole()),
            prefill_chunk=(T, Whole(optional=True)),
        ),
    ),
    "generate with a model": Call(
        lambda model: generate.generate(model, IDS[0], max_new_tokens=2), dict(model=(TRANSFORMER(), Of()))
    ),
    "sample": Call(
        generate.sample,
        dict(
            logits=(floats(B, VOCAB), Floats(axes="BV", free="V")),
            keys=(KEYS, Of()),
            temperature=(1.0, Given(True, TOO_HOT | {"0": 0.0})),
            top_k=(3, Whole(optional=True)),
            top_p=(0.5, SHARE),
        ),
    ),
    "truncate": Call(
        generate.truncate,
        dict(logits=(floats(B, VOCAB), Floats(axes="")), top_k=(3, Whole(optional=True)), top_p=(0.5, SHARE)),
    ),
}
