"""Who imports whom, read from every source file; and what the torch-free commands load and cost, measured on the real
processes."""

import ast
import os
import resource
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PACKAGES = {
    "mesatron": ROOT / "mesatron",
    "mesatron_data": ROOT / "data_pipeline/mesatron_data",
    "mesatron_kernels": ROOT / "kernels/mesatron_kernels",
}


def imported_modules(file: Path) -> set[str]:
    """Modules that a file imports anywhere, also inside functions; relative imports stay in their package."""
    modules = set()
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.Import):
            modules |= {name.name for name in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            modules |= {node.module} | {f"{node.module}.{name.name}" for name in node.names}
    return modules


def imported_by(folder: Path) -> dict[str, set[str]]:
    found = {str(file.relative_to(ROOT)): imported_modules(file) for file in folder.rglob("*.py")}
    assert len(found) > 3
    return found


def packages(modules: set[str]) -> set[str]:
    return {module.partition(".")[0] for module in modules}


@pytest.mark.parametrize(
    ("package", "others"),
    [("mesatron_kernels", {"mesatron", "mesatron_data"}), ("mesatron_data", {"mesatron", "mesatron_kernels"})],
)
def test_operators_and_data_know_neither_the_system_nor_each_other(package: str, others: set[str]) -> None:
    wrong = {file: packages(found) & others for file, found in imported_by(PACKAGES[package]).items()}
    assert not {file: names for file, names in wrong.items() if names}


def test_the_model_knows_nothing_of_processes_and_training() -> None:
    allowed = ("mesatron.config", "mesatron.model")
    for file, found in imported_by(ROOT / "mesatron/model").items():
        assert all(module.startswith(allowed) for module in found if module.startswith("mesatron.")), file
        assert not any(module.startswith(("torch.distributed", "deepspeed")) for module in found), file


@pytest.mark.parametrize(
    ("arguments", "code"),
    [
        (["--help"], 0),
        (["train", "--help"], 0),
        (["config", "check", "configs/paper/mesanet-1b-50b.yaml"], 0),
        (["config", "check", "configs/quickstart.yaml", "train.peak_lrr=1"], 2),
        (["train", "configs/quickstart.yaml", "train.peak_lrr=1"], 2),
        (["generate", "--help"], 0),
        (["launch", "slurm", "configs/quickstart.yaml", "--nodes=2", "--dry-run"], 0),
        (["compare", "configs/compare/cpu.yaml", "train.peak_lrr=1"], 2),
    ],
)
def test_a_quick_answer_without_torch(arguments: list[str], code: int) -> None:
    def cpu_seconds() -> float:
        used = resource.getrusage(resource.RUSAGE_CHILDREN)
        return used.ru_utime + used.ru_stime

    before = cpu_seconds()
    command = [sys.executable, "-X", "importtime", "-m", "mesatron", *arguments]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, env=os.environ | {"COLUMNS": "80"})
    seconds = cpu_seconds() - before
    assert done.returncode == code, done.stderr
    loaded = {line.rpartition("|")[2].strip() for line in done.stderr.splitlines() if line.startswith("import time:")}
    assert "mesatron.cli" in loaded
    heavy = {"torch", "numpy", "deepspeed", "streaming", "sentencepiece", "tensorboard", "matplotlib"}
    assert not packages(loaded) & heavy
    assert seconds < 1
