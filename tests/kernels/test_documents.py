"""Bounds are read once for each tensor, and again when it has changed; a second layer does not wait for the GPU."""

import gc
import weakref

import pytest
import torch
from mesatron_kernels import mesa
from mesatron_kernels.documents import documents_of, send_documents
from torch import Tensor


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_what_is_made_of_bounds_is_kept_while_they_are_the_same(dtype: torch.dtype) -> None:
    cu_seqlens, seen = torch.tensor([0, 3, 7], dtype=dtype), []

    def made() -> int:
        return documents_of(cu_seqlens).made("last", lambda bounds: seen.append(bounds.tolist()) or int(bounds[-1]))

    assert [made(), made()] == [7, 7]
    assert seen == [[0, 3, 7]]
    assert documents_of(torch.tensor([0, 3, 7])).bounds is not documents_of(cu_seqlens).bounds
    cu_seqlens[-1] = 9
    assert [made(), made()] == [9, 9]
    assert seen == [[0, 3, 7], [0, 3, 9]]


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_bounds_are_forgotten_with_their_tensor(dtype: torch.dtype) -> None:
    cu_seqlens = send_documents(torch.tensor([0, 3, 7], dtype=dtype), torch.device("cpu"))
    kept = weakref.ref(documents_of(cu_seqlens))
    documents_of(cu_seqlens).made("next", lambda bounds: send_documents(bounds + 1, torch.device("cpu")))
    del cu_seqlens
    gc.collect()
    assert kept() is None


def test_bounds_of_an_inference_tensor() -> None:
    with torch.inference_mode():
        cu_seqlens = torch.tensor([0, 5])
        assert documents_of(cu_seqlens).bounds.tolist() == [0, 5]


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_no_layer_waits_for_the_gpu() -> None:
    """Bounds that were sent from the host are never read, with sequences scanned whole and in pieces."""
    tokens, heads, size, device = 4096, 2, 64, torch.device("cuda")
    generator = torch.Generator().manual_seed(0)
    q, k, v = (
        torch.nn.functional.normalize(torch.randn(1, tokens, heads, size, generator=generator), dim=-1)
        .to(device, torch.bfloat16).requires_grad_()
        for _ in range(3)
    )  # fmt: skip
    log_gamma, beta = (x * torch.rand(1, tokens, heads, generator=generator).to(device) for x in (-0.1, 1.0))
    lam = torch.ones(heads, size, device=device)

    def differentiate(bounds: list[int]) -> tuple[Tensor, ...]:
        cu_seqlens = send_documents(torch.tensor(bounds, dtype=torch.int32), device)
        o = mesa(q, k, v, log_gamma, beta, lam, cu_seqlens=cu_seqlens, implementation="triton").o
        return torch.autograd.grad(o, (q, k, v), torch.ones_like(o))

    cases = [[0, 1000, 1001, 3000, tokens], [0, 10, tokens]]
    for bounds in cases:  # compiles
        differentiate(bounds)
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        for bounds in cases:
            differentiate(bounds)
    finally:
        torch.cuda.set_sync_debug_mode("default")
