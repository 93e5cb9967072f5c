"""Operators of MesaNet language models, each with several implementations behind one signature."""

from mesatron_kernels.operator import Choice, Implementation, available, forms, mesa, mesa_step, register, resolve
from mesatron_kernels.selfcheck import SelfCheck, selfcheck
from mesatron_kernels.state import MesaOutput, MesaState

__all__ = [
    "Choice",
    "Implementation",
    "MesaOutput",
    "MesaState",
    "SelfCheck",
    "available",
    "forms",
    "mesa",
    "mesa_step",
    "register",
    "resolve",
    "selfcheck",
]
