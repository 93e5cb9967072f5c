"""Operators of MesaNet language models, each with several implementations behind one signature."""

from mesatron_kernels.operator import Implementation, available, mesa, mesa_step, register, resolve
from mesatron_kernels.state import MesaOutput, MesaState

__all__ = ["Implementation", "MesaOutput", "MesaState", "available", "mesa", "mesa_step", "register", "resolve"]
