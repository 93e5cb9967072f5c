"""The recurrences of linear mixers as operators, each in several implementations of one meaning.

`step` of a recurrence is its definition. `reference` goes token by token in float64, `torch` works on chunks by matrix
products, `fla` calls fla-core's kernels on a GPU.
"""

from mesatron.model.recurrences.delta_rule import DeltaInputs, DeltaRule
from mesatron.model.recurrences.linear_attention import LinearAttention, LinearInputs, LinearState
from mesatron.model.recurrences.mesa import Mesa, MesaInputs, MesaRLS
from mesatron.model.recurrences.mlstm import MLSTM, MLSTMInputs, MLSTMState
from mesatron.model.recurrences.recurrence import Output, Recurrence
from mesatron.model.recurrences.rg_lru import RGLRU, RGLRUInputs, RGLRUState

__all__ = [
    "MLSTM",
    "RGLRU",
    "DeltaInputs",
    "DeltaRule",
    "LinearAttention",
    "LinearInputs",
    "LinearState",
    "MLSTMInputs",
    "MLSTMState",
    "Mesa",
    "MesaInputs",
    "MesaRLS",
    "Output",
    "RGLRUInputs",
    "RGLRUState",
    "Recurrence",
]
