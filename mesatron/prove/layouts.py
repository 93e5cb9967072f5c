"""The layouts that are proved. Torch-free."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from mesatron.errors import ConfigError


@dataclass(frozen=True)
class Case:
    """One way to spread a run over processes; with `documents` every document starts with an empty state."""

    tensor: int = 1
    context: int = 1
    pipeline: int = 1
    data: int = 1
    zero_stage: int = 1
    sequence_parallel: bool = False
    documents: bool = False
    recompute: str = "none"
    offload: bool = False
    micro_batch: int = 1

    @property
    def processes(self) -> int:
        return math.prod((self.tensor, self.context, self.pipeline, self.data))

    @property
    def name(self) -> str:
        """Such as `TP2+SP x DP2, ZeRO-3, documents`."""
        sizes = {"TP": self.tensor, "CP": self.context, "PP": self.pipeline, "DP": self.data}
        parts = [f"{name}{size}" for name, size in sizes.items() if size > 1]
        if self.sequence_parallel:
            parts[0] += "+SP"
        parts = [" x ".join(parts) or "one process", f"ZeRO-{self.zero_stage}"]
        parts += ["offload"] * self.offload + [f"{self.recompute} recompute"] * (self.recompute != "none")
        parts += [f"micro-batches of {self.micro_batch}"] * (self.micro_batch > 1)
        return ", ".join(parts + ["documents"] * self.documents)

    @property
    def parallel(self) -> list[str]:
        """Its sizes, as overrides of a config."""
        return [
            f"parallel.tensor_size={self.tensor}",
            f"parallel.sequence_parallel={str(self.sequence_parallel).lower()}",
            f"parallel.context_size={self.context}",
            f"parallel.pipeline_size={self.pipeline}",
            f"parallel.data_size={self.data}",
            f"parallel.zero_stage={self.zero_stage}",
            f"parallel.offload_optimizer={str(self.offload).lower()}",
        ]

    @property
    def overrides(self) -> list[str]:
        """All that it says, as overrides of a config."""
        return [
            *self.parallel,
            f"train.activation_checkpointing={self.recompute}",
            f"train.micro_batch_size={self.micro_batch}",
            f"data.reset_state_at_documents={str(self.documents).lower()}",
        ]

    @property
    def reference(self) -> Case:
        """The one process it is compared with."""
        return Case(documents=self.documents)


CASES = [
    Case(tensor=2),
    Case(tensor=4),
    Case(tensor=2, sequence_parallel=True),
    Case(tensor=4, sequence_parallel=True, documents=True),
    Case(context=2),
    Case(context=2, documents=True),
    Case(context=4),
    Case(context=4, documents=True),
    Case(pipeline=2),
    Case(pipeline=3, documents=True),
    Case(pipeline=2, data=2),
    Case(tensor=2, context=2),
    Case(tensor=2, context=2, sequence_parallel=True, documents=True),
    Case(tensor=2, pipeline=2),
    Case(tensor=2, pipeline=2, sequence_parallel=True, documents=True),
    Case(context=2, pipeline=2, documents=True),
    *(Case(tensor=2, data=2, zero_stage=stage) for stage in (0, 1, 2, 3)),
    *(Case(tensor=2, data=2, zero_stage=stage, sequence_parallel=True, documents=True) for stage in (1, 2, 3)),
    Case(context=2, data=2, zero_stage=2),
    Case(context=2, data=2, zero_stage=3, documents=True),
    *(Case(data=4, zero_stage=stage) for stage in (0, 1, 2, 3)),
    *(Case(data=2, zero_stage=stage) for stage in (0, 1, 2, 3)),
    Case(data=3),
    *(Case(data=2, zero_stage=stage, offload=True, recompute="selective") for stage in (1, 2, 3)),
    Case(tensor=2, data=2, zero_stage=3, sequence_parallel=True, recompute="full", offload=True),
    Case(context=2, pipeline=2, recompute="full", documents=True),
    Case(tensor=2, context=2, sequence_parallel=True, recompute="selective"),
    Case(tensor=2, sequence_parallel=True, micro_batch=3, documents=True),
    Case(context=2, micro_batch=3, documents=True),
    Case(pipeline=2, micro_batch=3, documents=True),
    Case(data=2, zero_stage=3, micro_batch=3),
    Case(tensor=2, context=2, sequence_parallel=True, micro_batch=2),
    Case(context=2, pipeline=2, micro_batch=2),
]
CORE = [
    Case(tensor=2, documents=True),
    Case(tensor=2, sequence_parallel=True),
    Case(context=2),
    Case(context=2, documents=True),
    Case(pipeline=2, documents=True),
]
"""Those in which mixers differ, two processes each."""


def chosen(cases: Sequence[Case], names: Sequence[str]) -> list[Case]:
    """Those of `cases` that `names` names; all if there are none. Raises ConfigError for a name that is no case's."""
    if unknown := set(names) - {case.name for case in cases}:
        known = "; ".join(case.name for case in cases)
        raise ConfigError(f"--layout {min(unknown)!r} is no layout here; known are {known}.")
    return [case for case in cases if not names or case.name in names]
