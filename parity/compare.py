"""Compares one case of any kind, with products that are exact enough for a reference."""

import contextlib
from collections.abc import Callable, Iterator

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

from parity import cases, decoding, layers, operations
from parity.budget import Row


def compare(case: cases.Case, dtype: torch.dtype, device: str, implementation: str | None) -> list[Row]:
    """All rows of a case.

    Raises:
      NotImplementedError: the implementation cannot run it.
    """
    kinds: dict[type, Callable[..., list[Row]]] = {
        cases.OperationCase: operations.compare,
        cases.LayerCase: layers.compare,
        cases.DecodeCase: decoding.compare,
    }
    if implementation == "reference" and not isinstance(case, cases.OperationCase):
        raise NotImplementedError(
            f"only operations run on the oracle, got a {type(case).__name__}. Name an operation case."
        )
    with ieee_products():
        return kinds[type(case)](case, dtype, device, implementation)


@contextlib.contextmanager
def ieee_products() -> Iterator[None]:
    """Switches off TF32 and 16-bit partial sums, and takes the SDPA that computes the plain formula."""
    matmul = torch.backends.cuda.matmul
    names = ("allow_tf32", "allow_fp16_reduced_precision_reduction", "allow_bf16_reduced_precision_reduction")
    before = {name: getattr(matmul, name) for name in names}
    try:
        for name in names:
            setattr(matmul, name, False)
        with sdpa_kernel(SDPBackend.MATH):
            yield
    finally:
        for name, value in before.items():
            setattr(matmul, name, value)
