"""Compile the kernels for a GPU that need not be there: prints registers, stack and shared memory, a JSON line each.

python tests/kernels/compile_kernels.py 90
"""

import json
import re
import subprocess
import sys
import tempfile
from pathlib import Path

import triton
from mesatron_kernels import triton_kernels as kernels
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

BF16, FP16, FP32, INT = "*bf16", "*fp16", "*fp32", "*i32"
TYPES = dict.fromkeys(("q", "k", "v", "w", "o", "e", "dq", "dk", "dv", "G_high", "G_low"), BF16)
TYPES |= dict.fromkeys(("dH_high", "dH_low", "dG_high", "dG_low", "high", "low", "S_high", "S_low"), BF16)
TYPES |= dict.fromkeys(("H_high", "H_low"), FP16)
TYPES |= dict.fromkeys(("chunks", "first_chunk", "steps"), INT)
TYPES |= {"heads": "i32", "max_steps": "i32", "tokens_in_all": "i32", "tolerance": "fp32", "hardness": "fp32"}
SIZES = {"D": 128, "E": 128, "BLOCK_D": 128, "BLOCK_E": 128, "L": 64, "PRECISION": "bf16", "TILES": 2}
TILE = {"BLOCK_E": 64}
CASES = [
    (kernels.forward_states, TILE | {"HAS_INITIAL": True, "SCALED": True}, {"high": FP16, "low": FP16, "w": BF16}, 2),
    (kernels.forward_states, TILE | {"HAS_INITIAL": False, "SCALED": False}, {}, 2),
    (kernels.solve, {"ADJOINT": False}, {"b": BF16}, 1),
    (kernels.solve, {"ADJOINT": True}, {"b": FP32}, 1),
    (kernels.read_out, {"TRANSPOSED": False}, {"x": FP32, "y": BF16}, 1),
    (kernels.read_out, {"TRANSPOSED": True}, {"x": BF16, "y": FP32}, 1),
    (
        kernels.backward_states,
        TILE | {"SYMMETRIC": True, "HAS_FINAL": True, "SCALED": True},
        {"a": FP32, "b": FP32, "S_high": FP16, "S_low": FP16},
        1,
    ),
    (kernels.backward_states, TILE | {"SYMMETRIC": False, "HAS_FINAL": False, "SCALED": False}, {"a": BF16}, 1),
    (kernels.backward_inputs, {"COLUMNS": 64}, {}, 1),
    (kernels.backward_gates, {"BLOCKS": 2, "PARTS_H": 2, "PARTS_G": 2, "BLOCK_HEADS": 16}, {}, 1),
]


def compile_one(kernel, constants, types, num_stages, capability):
    """One kernel's resources, as the assembler reports them."""
    constants = {name: value for name, value in (SIZES | constants).items() if name in kernel.arg_names}
    types = TYPES | types
    signature = {n: "constexpr" if n in constants else types.get(n, FP32) for n in kernel.arg_names}
    positions = {(kernel.arg_names.index(name),): value for name, value in constants.items()}
    aligned = {(i,): [["tt.divisibility", 16]] for i, n in enumerate(kernel.arg_names) if signature[n].startswith("*")}
    source = ASTSource(kernel, signature=signature, constexprs=positions, attrs=aligned)
    options = {"num_warps": 4, "num_stages": num_stages}
    compiled = triton.compile(source, target=GPUTarget("cuda", capability, 32), options=options)
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(compiled.asm["cubin"])
        file.flush()
        dump = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
        command = [str(dump), "--dump-resource-usage", file.name]
        report = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    registers, stack = re.search(r"REG:(\d+) STACK:(\d+)", report).groups()
    return {
        "kernel": kernel.__name__,
        "capability": capability,
        "registers": int(registers),
        "stack_bytes": int(stack),
        "shared_bytes": compiled.metadata.shared,
    }


for case in CASES:
    print(json.dumps(compile_one(*case, int(sys.argv[1]))))
