"""Turn a forked process into one that torchrun might have started: its variables, output files and program.

The globals variables, output and command come from the fixture `world`.
"""

import os
import runpy
import sys

import torch

os.environ |= variables  # noqa: F821
for stream, descriptor in (("stdout", 1), ("stderr", 2)):
    file = os.open(f"{output}.{stream}", os.O_WRONLY | os.O_CREAT | os.O_TRUNC)  # noqa: F821
    os.dup2(file, descriptor)
    os.close(file)
torch.set_num_threads(1)
sys.argv = command  # noqa: F821
runpy.run_path(command[0], run_name="__main__")  # noqa: F821
