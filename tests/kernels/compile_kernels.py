"""Compile the kernels for GPUs that need not be there: prints registers, spills, shared memory and loops that end by a
condition (solves), a JSON line each.

    python tests/kernels/compile_kernels.py 90 80          what test_compiled.py looks at
    python tests/kernels/compile_kernels.py 90 80 --all    every kernel of every dtype, head size and chunk length

Spilt registers show as bytes of stack and as instructions that load from and store to local memory.
"""

import itertools
import json
import os
import re
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import triton
from mesatron_kernels import triton_gradients as gradients
from mesatron_kernels import triton_solve as solve
from mesatron_kernels import triton_states as states
from mesatron_kernels.launch import SHARED_BYTES
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

TOOLS = Path(triton.__file__).parent / "backends/nvidia/bin"
# Sequences of one length, from an empty state.
CONSTANTS = dict.fromkeys(("chunks", "sequences", "first_chunk"))
CONSTANTS |= {"BLOCK_HEADS": 16}
ENDLESS = dict.fromkeys(("final_H", "final_G", "initial_H", "initial_G", "last_H", "last_G"))
# Name, kernel, constants, num_warps for heads up to 64 and beyond, num_stages: as triton_chunkwise launches them.
CASES = [
    ("prepare", states.prepare, {}, (8, 8), 3),
    ("forward_states", states.forward_states, ENDLESS | {"decay": None}, (4, 8), 1),
    ("solve_forward", solve.solve_forward, {}, (4, 4), 1),
    ("solve_backward", solve.solve_backward, {}, (4, 4), 1),
    ("backward_states", states.backward_states, ENDLESS, (4, 8), 1),
    ("backward_inputs", gradients.backward_inputs, {}, (4, 8), 1),
    ("backward_queries", gradients.backward_queries, {}, (4, 4), 3),
    ("combine", states.combine, {"BACKWARD": False, "BLOCK": 1024}, (4, 4), 3),
    ("backward_gates", gradients.backward_gates, {}, (4, 4), 3),
]
TRAINING = ("bf16", 128, 64)
"""Precision, head size and chunk length whose every kernel must be good."""
HUNGRIEST = {
    ("bf16", 64, 64): "backward_inputs",
    ("tf32x3", 64, 16): "solve_backward",
    ("tf32x3", 128, 16): "solve_backward",
}
"""Of the others, the kernel that takes most shared memory."""


def argument_types(precision: str) -> dict[str, str]:
    """Triton's names of the types of arguments that are not float32 pointers."""
    inputs, terms = ("*bf16", "*fp16") if precision == "bf16" else ("*fp32", "*fp32")
    types = dict.fromkeys(("q", "k", "v", "o", "e", "dq", "dk", "dv"), inputs) | {"keys": terms}
    types |= {f"{name}_{term}": terms for name in ("q", "e", "H", "G", "dH", "dG") for term in ("high", "low")}
    types |= dict.fromkeys(("hard", "steps", "first_piece"), "*i32")
    types |= dict.fromkeys(("N", "length", "per_sequence", "heads", "max_steps", "size"), "i32")
    return types | dict.fromkeys(("tolerance", "hardness"), "fp32")


def compile_one(case, precision: str, head_size: int, chunk_length: int, capability: int) -> dict:
    """One kernel's resources, as the assembler reports them."""
    name, kernel, constants, num_warps, num_stages = case
    sizes = dict.fromkeys(("D", "E", "BLOCK_D", "BLOCK_E"), head_size) | {"L": chunk_length, "PRECISION": precision}
    if precision != "bf16":
        sizes["keys"] = None
    constants = {key: value for key, value in (CONSTANTS | sizes | constants).items() if key in kernel.arg_names}
    types = argument_types(precision)
    if name == "backward_inputs":
        types["k"] = types["keys"]
    signature = {n: "constexpr" if n in constants else types.get(n, "*fp32") for n in kernel.arg_names}
    positions = {(kernel.arg_names.index(key),): value for key, value in constants.items()}
    aligned = {(i,): [["tt.divisibility", 16]] for i, n in enumerate(kernel.arg_names) if signature[n].startswith("*")}
    source = ASTSource(kernel, signature=signature, constexprs=positions, attrs=aligned)
    options = {"num_warps": num_warps[head_size > 64], "num_stages": num_stages}
    compiled = triton.compile(source, target=GPUTarget("cuda", capability, 32), options=options)
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(compiled.asm["cubin"])
        file.flush()
        command = [str(TOOLS / "cuobjdump"), "--dump-resource-usage", "--dump-sass", file.name]
        report = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    registers, stack = re.search(r"REG:(\d+) STACK:(\d+)", report).groups()
    return {
        "kernel": name,
        "capability": capability,
        "precision": precision,
        "head_size": head_size,
        "chunk_length": chunk_length,
        "registers": int(registers),
        "stack_bytes": int(stack),
        "spill_loads": len(re.findall(r"\bLDL\b", report)),
        "spill_stores": len(re.findall(r"\bSTL\b", report)),
        "shared_bytes": compiled.metadata.shared,
        "solves": compiled.asm["ttir"].count("scf.while"),
    }


def main(capabilities: list[int], everything: bool) -> None:
    precisions = {16: "bf16", 32: "tf32x3"}
    shapes = [(precisions[bits], size, length) for (bits, size), (length, _) in SHARED_BYTES.items()]
    jobs = [
        (case, *shape, capability)
        for capability, shape, case in itertools.product(capabilities, shapes, CASES)
        if everything or shape == TRAINING or HUNGRIEST[shape] == case[0]
    ]
    with ThreadPoolExecutor(len(os.sched_getaffinity(0))) as pool:
        for report in pool.map(lambda job: compile_one(*job), jobs):
            print(json.dumps(report), flush=True)


if __name__ == "__main__":
    main([int(word) for word in sys.argv[1:] if word.isdigit()], "--all" in sys.argv)
