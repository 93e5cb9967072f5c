"""How far an implementation of the Mesa operator is from the exact result, in its output and in every gradient; and
inputs to find that out with."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Literal, TypedDict, get_args

import torch
import torch.nn.functional as F
from torch import Tensor

Keys = Literal["silu", "normal", "lowrank", "identical"]
KINDS: tuple[Keys, ...] = get_args(Keys)

Operator = Callable[..., Sequence[Tensor]]
"""Takes the inputs in the order of `draw_inputs`, initial states H and G after them if there are any, and returns o, or
o and the final H and G."""


class Solver(TypedDict):
    """The solver's settings, as in `mesatron_kernels.mesa`."""

    max_steps: int
    tolerance: float


EXACT: Solver = {"max_steps": 1000, "tolerance": 1e-12}
"""Solver settings by which the torch implementation in float64 is exact."""


def draw_inputs(
    keys: Keys,
    batch: int,
    length: int,
    heads: int,
    head_size: int,
    *,
    dtype: torch.dtype,
    device: torch.device,
    gamma: float | None = None,
    lam: float = 1.0,
    seed: int = 0,
) -> dict[str, Tensor]:
    """q, k, v [batch, length, heads, head_size] in `dtype`; float32 log_gamma, beta [batch, length, heads] and lam
    [heads, head_size], by name in the operator's order.

    keys: "silu" and "normal" are independent, "lowrank" move slowly through a space of 8 dimensions, which makes the
    solve hard, "identical" are the extreme of that. gamma: of every token; by default sigmoid(normal + 4).
    """
    generator = torch.Generator(device).manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, device=device)

    tokens = (batch, length, heads)
    q = F.silu(normal(*tokens, head_size))
    if keys == "silu":
        k = F.silu(normal(*tokens, head_size))
    elif keys == "normal":
        k = normal(*tokens, head_size)
    elif keys == "identical":
        k = normal(1, 1, heads, head_size).expand(*tokens, head_size)
    else:
        directions = normal(batch, heads, 8, head_size)
        place = normal(batch, 1, heads, 8) + 0.05 * normal(*tokens, 8).cumsum(1)
        k = torch.einsum("bthr,bhrd->bthd", place, directions) + 0.05 * normal(*tokens, head_size)
    v = normal(*tokens, head_size)
    log_gamma = F.logsigmoid(normal(*tokens) + 4.0)
    if gamma is not None:
        log_gamma = torch.full_like(log_gamma, gamma).log()
    q, k, v = (x.to(dtype).contiguous() for x in (F.normalize(q, dim=-1), F.normalize(k, dim=-1), v))
    return {
        "q": q, "k": k, "v": v, "log_gamma": log_gamma, "beta": torch.sigmoid(normal(*tokens)),
        "lam": torch.full((heads, head_size), lam, device=device),
    }  # fmt: skip


def draw_states(count: int, heads: int, head_size: int, *, device: torch.device, seed: int = 1) -> dict[str, Tensor]:
    """Initial states H (positive semidefinite, of norm about sqrt(head_size)) and G, float32 [count, heads, D, D]."""
    generator = torch.Generator(device).manual_seed(seed)
    root, G = torch.randn(2, count, heads, head_size, head_size, generator=generator, device=device)
    return {"H_0": root @ root.mT / head_size, "G_0": G}


def outputs_and_gradients(
    operator: Operator, inputs: dict[str, Tensor], cotangents: Sequence[Tensor]
) -> dict[str, Tensor]:
    """What `operator` returns ("o", "H", "G") and, as "d" + name, the gradient of every input; detached, in float64.

    cotangents: one for each output, cast to its dtype. The gradient of H_0, which is symmetric, is the symmetric part.
    """
    leaves = [x.detach().clone().requires_grad_() for x in inputs.values()]
    with torch.enable_grad():
        outputs = operator(*leaves)
        given = [c.to(o.dtype) for c, o in zip(cotangents, outputs, strict=True)]
        gradients = torch.autograd.grad(outputs, leaves, given)
    found = dict(zip(("o", "H", "G"), outputs, strict=False))
    found |= {f"d{name}": gradient for name, gradient in zip(inputs, gradients, strict=True)}
    if "dH_0" in found:
        found["dH_0"] = (found["dH_0"] + found["dH_0"].mT) / 2
    return {name: value.detach().double() for name, value in found.items()}


def relative_errors(found: dict[str, Tensor], exact: dict[str, Tensor]) -> dict[str, float]:
    """||found - exact|| / ||exact|| by name; infinite where `found` is not finite."""

    def error(name: str) -> float:
        off = torch.linalg.vector_norm(found[name] - exact[name])
        relative = float(off / torch.linalg.vector_norm(exact[name]).clamp_min(1e-300))
        return relative if relative < float("inf") else float("inf")  # not a number compares false

    return {name: error(name) for name in exact}
