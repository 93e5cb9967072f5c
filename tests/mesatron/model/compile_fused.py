"""Compile the model's Triton kernels for GPUs that need not be there: resources of each, a JSON line each.

python tests/mesatron/model/compile_fused.py 90 80
"""

import json
import re
import subprocess
import sys
import tempfile
from pathlib import Path

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from mesatron.model import fused_kernels as fused
from mesatron.model import loss_kernels as loss
from mesatron.model.recurrences import decay_kernels as decay

TOOLS = Path(triton.__file__).parent / "backends/nvidia/bin"
# Pointers not named here are bf16; so are activations, weights and logits in training.
TYPES = dict.fromkeys(("N", "M", "T", "C", "V", "stride", "heads", "part_length"), "i32") | dict.fromkeys(
    ("epsilon", "cap"), "fp32"
)
TYPES |= dict.fromkeys(("normalizers", "dnormalizers", "chosen", "dchosen", "dweight"), "*fp32")
TYPES |= dict.fromkeys(("weights", "dweights", "sums", "log_gamma", "after", "total"), "*fp32")
TYPES |= dict.fromkeys(("dlog_gamma", "dafter", "dtotal"), "*fp32")
TYPES |= {"targets": "*i64", "position": "*i32"}
ALIGNED = ("N", "T", "C", "stride")  # multiples of 16, as 768 channels and padded logits are
HEADS = fused._tile(128, fused.TILE // 2) | {"WIDTH": 4, "DOCUMENTS": True, "history": None}
AFTER = fused._tile(128, fused.TILE // 2) | {"WIDTH": 4, "DOCUMENTS": False, "position": None}
CASES = [
    *(
        case
        for channels in (128, 768)
        for case in (
            (fused.rms_norm_forward, fused._tile(channels)),
            (fused.rms_norm_backward, fused.norm_sums(channels)),
        )
    ),
    (fused.swiglu_forward, {"BLOCK": fused.TILE}),
    (fused.swiglu_backward, {"BLOCK": fused.TILE}),
    (fused.unit_heads_forward, HEADS),
    (fused.unit_heads_backward, HEADS | fused.heads_sums(128)),
    (fused.unit_heads_forward, AFTER),
    (fused.unit_heads_backward, AFTER | fused.heads_sums(128)),
    (fused.convolution_backward, HEADS),
    (fused.history_backward, AFTER),
    (loss.scores_forward, {"BLOCK": loss.BLOCK, "num_warps": 8}),
    (loss.scores_backward, {"BLOCK": loss.BLOCK, "num_warps": 8}),
    *(
        (kernel, decay.sizes(channels, channels, squares, kernel))
        for channels in (64, 128)
        for squares in (False, True)
        for kernel in (decay.products_forward, decay.products_backward)
    ),
    (decay.products_backward, decay.sizes(256, 256, False, decay.products_backward)),
    *((kernel, decay.scan(2**14)) for kernel in (decay.decays_forward, decay.decays_backward)),
]


def compile_one(kernel, constants: dict, capability: int) -> dict:
    """One kernel's resources; `wide_loads` and `loads` of global memory, of 16 bytes a thread and of any size."""
    options = {"num_warps": 4} | {n: constants[n] for n in ("num_warps", "num_stages") if n in constants}
    constants = {name: value for name, value in constants.items() if name in kernel.arg_names}
    signature = {n: "constexpr" if n in constants else TYPES.get(n, "*bf16") for n in kernel.arg_names}
    positions = {(kernel.arg_names.index(name),): value for name, value in constants.items()}
    aligned = [i for i, n in enumerate(kernel.arg_names) if signature[n].startswith("*") or n in ALIGNED]
    attributes = {(i,): [["tt.divisibility", 16]] for i in aligned}
    source = ASTSource(kernel, signature=signature, constexprs=positions, attrs=attributes)
    compiled = triton.compile(source, target=GPUTarget("cuda", capability, 32), options=options)
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(compiled.asm["cubin"])
        file.flush()
        command = [str(TOOLS / "cuobjdump"), "--dump-resource-usage", "--dump-sass", file.name]
        report = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    registers, stack = re.search(r"REG:(\d+) STACK:(\d+)", report).groups()
    return {
        "kernel": kernel.__name__,
        "channels": constants.get("D"),
        "capability": capability,
        "registers": int(registers),
        "stack_bytes": int(stack),
        "shared_bytes": compiled.metadata.shared,
        "wide_loads": len(re.findall(r"\bLDG\.E\.128", report)),
        "loads": len(re.findall(r"\bLDG\.E", report)),
    }


for capability in map(int, sys.argv[1:]):
    for case in CASES:
        print(json.dumps(compile_one(*case, capability)), flush=True)
