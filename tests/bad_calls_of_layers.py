"""Good calls of layers and their parts."""

import jax.numpy as jnp
import numpy as np
from bad_calls import (
    BLOCKS,
    CONFIG,
    DENSE,
    LAYER,
    PLACES,
    B,
    C,
    Call,
    D,
    H,
    K,
    N,
    T,
    V,
    abstract,
    floats,
    ints,
    made,
    method,
)
from bad_values import (
    NO_FLOAT,
    DType,
    Flag,
    Floats,
    FreeName,
    Function,
    Given,
    Integers,
    Name,
    Of,
    Real,
    Scale,
    Sharding,
    Whole,
)
from flax import nnx

from nsa_jax import nn

RATE = Given(refused=NO_FLOAT | {"negative": -0.1, "1": 1.0, "10^400": 10**400})
PARAMETERS = dict(
    dtype=(None, DType(optional=True)),
    param_dtype=(jnp.float32, DType()),
    precision=(None, Name(optional=True)),
    rngs=(nnx.Rngs(0), Of()),
)
OPTIONAL_FUNCTION = (None, Function(optional=True))
INITIALIZER = (nnx.initializers.zeros_init(), Function())
DENSE_OPTIONS = dict(
    num_heads=(N, Whole()),
    in_features=(D, Whole()),
    num_kv_heads=(K, Whole()),
    head_dim=(H, Whole(optional=True)),
    use_bias=(False, Flag()),
    normalize_qk=(False, Flag()),
    scale=(None, Scale(optional=True)),
    dropout_rate=(0.5, RATE),
    rope_base=(10000.0, Real()),
    rope_scaling=(None, Of(optional=True)),
    rotary=OPTIONAL_FUNCTION,
    kernel_init=INITIALIZER,
    out_kernel_init=OPTIONAL_FUNCTION,
    bias_init=INITIALIZER,
    sharding=(None, Sharding(optional=True)),
    implementation=("xla", Name(optional=True)),
    **PARAMETERS,
)
X = (floats(B, T, D), Floats(axes="BTD", free="BT"))
X_OF_MANY = (floats(B, T, D), Floats(axes="BTD"))
PER_TOKEN = dict(
    positions=(ints(B, T), Integers(True, "BT")),
    segment_ids=(np.ones((B, T), np.int32), Integers(True, "BT")),
)
DROPOUT = dict(deterministic=(True, Flag(optional=True)), rngs=(nnx.Rngs(0), Of(optional=True)))

UNMAPPED = {"list": [1.0], "None": None, "int": 3, "unknown": {"a": np.ones(3)}, "no array": {"a": 3}}

LAYERS = {
    "NSAAttention": Call(
        made(nn.NSAAttention),
        DENSE_OPTIONS
        | dict(
            value_dim=(V, Whole(optional=True)),
            config=(CONFIG, Of()),
            share_keys_values=(False, Flag()),
            compression=("mlp", Name()),
            compressor=OPTIONAL_FUNCTION,
            gate=OPTIONAL_FUNCTION,
            context_axis=(None, FreeName(optional=True)),
            context_order=("zigzag", Name()),
        ),
    ),
    "DenseAttention": Call(
        made(nn.DenseAttention), DENSE_OPTIONS | dict(window_size=(3, Whole(optional=True)))
    ),
    "Gate": Call(
        made(nn.Gate),
        dict(
            in_features=(D, Whole()),
            num_heads=(N, Whole()),
            hidden_dim=(8, Whole(optional=True)),
            sharding=(None, Sharding(optional=True)),
            **PARAMETERS,
        ),
    ),
    "Compressor": Call(
        made(nn.Compressor),
        dict(
            head_dim=(H, Whole()),
            config=(CONFIG, Of()),
            mode=("mlp", Name()),
            hidden_dim=(8, Whole(optional=True)),
            **PARAMETERS,
        ),
    ),
    "NSAAttention()": Call(
        method(LAYER, "__call__"),
        dict(x=X_OF_MANY, block_indices=(BLOCKS[0], Integers(True, "BTKR"))) | PER_TOKEN | DROPOUT,
    ),
    "NSAAttention.operands": Call(method(LAYER, "operands"), dict(x=X_OF_MANY) | PER_TOKEN),
    "NSAAttention.inspect": Call(method(LAYER, "inspect"), dict(x=X_OF_MANY) | PER_TOKEN),
    "DenseAttention()": Call(method(DENSE, "__call__"), dict(x=X_OF_MANY) | PER_TOKEN | DROPOUT),
    "Gate()": Call(method(abstract(nn.Gate, in_features=D, num_heads=N), "__call__"), dict(x=X)),
    "Compressor()": Call(
        method(abstract(nn.Compressor, head_dim=H, config=CONFIG), "__call__"),
        dict(windows=(floats(B, C, 4, K, H), Floats(axes="BmlKH", free="BmK"))),
    ),
    "Compressor.is_data": Call(
        method(abstract(nn.Compressor, head_dim=H, config=CONFIG), "is_data"),
        dict(dtype=("float32", DType())),
    ),
    "Compressor.weights": Call(
        method(abstract(nn.Compressor, head_dim=H, config=CONFIG), "weights"),
        dict(dtype=("float32", DType())),
    ),
    "LinearScaling": Call(nn.LinearScaling, dict(factor=(2.0, Real()))),
    "Llama3Scaling": Call(
        nn.Llama3Scaling,
        dict(
            factor=(2.0, Real()),
            low_frequency_factor=(1.0, Real()),
            high_frequency_factor=(4.0, Real()),
            original_length=(64, Real()),
        ),
    ),
    "YarnScaling": Call(
        nn.YarnScaling,
        dict(
            factor=(2.0, Real()),
            original_length=(64, Real()),
            beta_fast=(32.0, Real()),
            beta_slow=(1.0, Real()),
            attention_factor=(1.0, Real(optional=True)),
        ),
    ),
    "load_weights": Call(
        nn.load_weights,
        dict(module=(nnx.Dict(), Of()), weights=({}, Given(refused=UNMAPPED))),
    ),
    "weights": Call(nn.weights, dict(module=(nnx.Dict(), Of()))),
    "rotate": Call(
        nn.rotate,
        dict(
            x=(floats(B, T, N, H), Floats(axes="BTNH", free="NH")),
            positions=(ints(B, T), Integers(axes="BT")),
            base=(10000.0, Real()),
            scaling=(None, Of(optional=True)),
        ),
    ),
    "token_windows": Call(
        nn.token_windows,
        dict(
            x=(floats(B, T, K, H), Floats(axes="BSKH", free="KH")),
            config=(CONFIG, Of()),
            segment_ids=PLACES["segment_ids"],
        ),
    ),
}
