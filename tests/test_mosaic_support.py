"""What the Mosaic GPU kernels refuse, beyond what Triton refuses: each case has one clear reason."""

import dataclasses

import jax
import pytest
from messages import has_form
from test_triton_support import installed, shapes  # noqa: F401 (a fixture)

from nsa_jax import dispatch
from nsa_jax.config import NSAConfig
from nsa_jax.kernels import chip
from nsa_jax.kernels.triton import support

CONFIG = NSAConfig()


def reason(arrays=None, config=CONFIG, operation="native_sparse_attention", **more):
    arrays = shapes() if arrays is None else arrays
    return dispatch.unsupported_reason(
        operation, "mosaic_gpu", *arrays, config=config, platform="cuda", **more
    )


@pytest.mark.parametrize("dims", [(128, 128), (64, 64), (192, 128)])
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_shapes_of_the_table_are_supported(installed, dims, dtype):  # noqa: F811
    arrays = shapes(dtype, *dims, heads=32)
    assert reason(arrays) is None
    blocks = jax.ShapeDtypeStruct((1, 99, 2, 16), "int32")
    assert reason((arrays[0], *arrays[3:5], blocks), operation="selected_attention") is None


@pytest.mark.parametrize("operation", ["compressed_attention", "gated_sum", "decode_step"])
def test_other_operations_need_what_triton_needs(installed, operation):  # noqa: F811
    assert reason((), operation=operation) is None
    installed.versions.pop("triton")
    support._installation.cache_clear()
    assert "need triton" in reason((), operation=operation)


@pytest.mark.parametrize(
    ("arrays", "changes", "part"),
    [
        (shapes("float32"), {}, "support the dtypes bfloat16, float16, got float32. Cast the arrays"),
        (shapes(key_dim=96), {}, "need key and value dims of 64/64, 128/128, 192/128, got 96/128"),
        (shapes(heads=34), {}, "need at most 16 query heads of one KV head, got 34 / 2"),
        (shapes(), dict(selection_block_size=16, compression_block_size=16), "of 32, 64, 128, got 16"),
        (shapes(), dict(num_selected_blocks=129), "num_selected_blocks of at most 128, got 129"),
    ],
    ids=["dtype", "dims", "heads", "block", "slots"],
)
def test_refused_calls_say_why_and_point_to_triton(installed, arrays, changes, part):  # noqa: F811
    text = reason(arrays, dataclasses.replace(CONFIG, **changes))

    assert part in text
    assert "implementation='triton'" in text
    assert has_form(text)


@pytest.mark.parametrize(("capability", "name"), [((8, 0), "8.0"), ((10, 0), "10.0"), ((12, 0), "12.0")])
def test_other_chips_are_named(installed, monkeypatch, capability, name):  # noqa: F811
    monkeypatch.setattr(chip, "capability", lambda: capability)

    text = reason()

    assert f"need compute capability 9.0 (Hopper), got {name}." in text
    assert ("Blackwell" in text) == (capability[0] > 9)
    assert "implementation='triton'" in text


@pytest.mark.parametrize(
    ("operation", "heads", "chosen", "part"),
    [
        ("native_sparse_attention", 32, "mosaic_gpu", None),
        ("selected_attention", 30, "mosaic_gpu", None),
        ("native_sparse_attention", 28, "triton", "fewer than 15 query heads of a KV head, got 28 / 2"),
        ("window_attention", 32, "triton", "serve operations with the selected branch, got window_attention"),
    ],
)  # fmt: skip
def test_choice_is_the_faster_one(installed, operation, heads, chosen, part):  # noqa: F811
    arrays = shapes(heads=heads)
    if operation != "native_sparse_attention":
        arrays = (arrays[0], *arrays[3:5])

    choice = dispatch.choose(operation, *arrays, config=CONFIG, platform="cuda")

    assert choice.implementation == chosen
    refused = dict(choice.refused)
    assert ("mosaic_gpu" in refused) == (part is not None)
    if part is not None:
        assert part in refused["mosaic_gpu"]
        assert has_form(refused["mosaic_gpu"])
    named = dispatch.choose(operation, *arrays, config=CONFIG, platform="cuda", implementation="mosaic_gpu")
    assert named.implementation == "mosaic_gpu"


@pytest.mark.parametrize(("jaxlib", "chosen"), [("0.11.2", "mosaic_gpu"), ("0.12.0.1", "triton")])
def test_a_jaxlib_that_makes_the_kernels_spill_prefers_triton(installed, jaxlib, chosen):  # noqa: F811
    installed.versions["jaxlib"] = jaxlib

    choice = dispatch.choose("native_sparse_attention", *shapes(heads=32), config=CONFIG, platform="cuda")

    assert choice.implementation == chosen
    if chosen == "triton":
        assert f"got {jaxlib}. " in dict(choice.refused)["mosaic_gpu"]
        assert has_form(dict(choice.refused)["mosaic_gpu"])
