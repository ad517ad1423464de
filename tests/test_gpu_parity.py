"""On a GPU: every case of parity by the Triton kernels, with torch and JAX on the same device."""

import pytest

pytestmark = pytest.mark.gpu
DTYPES = ("float32", "bfloat16", "float16")
# Cases with dims or block sizes that the kernels refuse; another test checks the reason they give.
NOT_FOR_KERNELS = {
    *("odd_dims", "adjoining_blocks", "layer", "layer_mean", "layer_packed", "layer_bias_odd_dims"),
    *("layer_shorter_than_a_block", "decode", "decode_from_one_token", "decode_mean_chunked"),
    *("decode_every_block", "layer_yarn", "layer_normed_packed", "layer_shared", "layer_own_parts_packed"),
    *("decode_normed", "decode_shared", "decode_own_parts"),
    *("layer_importance_packed", "layer_msa", "layer_weighted_packed", "layer_indexed"),
    *("decode_msa", "decode_weighted", "decode_indexed"),
}


def names() -> list[str]:
    torch = pytest.importorskip("torch")
    assert torch is not None
    from parity.cases import CASES

    return [name for name in CASES if name not in NOT_FOR_KERNELS]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", names())
def test_case_is_within_its_budget(name, dtype):
    import torch

    from parity.cases import CASES
    from parity.compare import compare

    rows = compare(CASES[name], getattr(torch, dtype), "cuda", "triton")

    assert [(row.quantity, row.error, row.budget, row.note) for row in rows if not row.passed] == []
    assert len(rows) > 1


@pytest.mark.parametrize("name", ["odd_dims", "layer"])
def test_dims_without_kernels_are_refused(name):
    import torch

    from parity.cases import CASES
    from parity.compare import compare

    with pytest.raises(NotImplementedError, match="cannot run as triton: the Triton kernels need key and"):
        compare(CASES[name], torch.bfloat16, "cuda", "triton")
