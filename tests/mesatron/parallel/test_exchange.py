"""What the processes of real worlds read and send, and that their copies stay copies.

Sequences: the same in a tensor, context or pipeline group, others in other data-parallel groups. Replicated weights:
equal to the bit on all processes after two updates, with sequence parallelism and without. Bytes of the second update:
by the formulas of docs/parallelism.md, counted at the collectives themselves. Borrowed tokens travel beside other work.
GPUs: each process on its own alone.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from mesatron_data.synthetic import write_shards

WITNESS = Path(__file__).with_name("witness.py")
WIDTH, LAYERS, HEADS, HEAD_DIM, VOCABULARY, FLOAT = 24, 3, 4, 6, 101, 4
BATCH, MICRO_BATCH = 8, 2


@pytest.fixture
def witness(tmp_path: Path, odd_config: Callable[..., Path], world: Callable[..., Any]) -> Callable[..., list[dict]]:
    """`witness(processes, context_length, **overrides)`: what every process of a layout has seen."""

    def run(processes: int, context_length: int, **overrides: Any) -> list[dict]:
        shards = tmp_path / f"shards-{context_length}"
        if not shards.exists():
            write_shards(shards, VOCABULARY, context_length, {"train": 2 * BATCH, "validation": 2}, seed=5)
        config = odd_config(
            tmp_path / "witness", shards,
            **{"model.width": WIDTH, "model.layers": LAYERS, "model.heads": HEADS, "model.head_dim": HEAD_DIM,
               "model.mlp_ratio": 1.5, "train.global_batch_size": BATCH, "train.micro_batch_size": MICRO_BATCH},
            **{f"parallel.{key}": value for key, value in overrides.items()},
        )  # fmt: skip
        outcome = world(processes, WITNESS, config, tmp_path)
        assert outcome.exit_code == 0, outcome.errors
        return [torch.load(tmp_path / f"{rank}.pt") for rank in range(processes)]

    return run


@pytest.mark.parametrize("sequence_parallel", [False, True])
def test_tensor_parallel(witness: Callable[..., list[dict]], sequence_parallel: bool) -> None:
    tensor, context_length = 2, 22
    seen = witness(4, context_length, tensor_size=tensor, sequence_parallel=sequence_parallel)
    ids = {process["place"][0]: [] for process in seen}
    for process in seen:
        ids[process["place"][0]].append(process["ids"])
    (first, first_too), (second, second_too) = ids.values()
    assert first == first_too
    assert second == second_too
    assert sorted(first + second) == list(range(2 * BATCH))

    assert len(seen[0]["replicated"]) == 2 * LAYERS + 1
    for process in seen[1:]:
        for name, weight in seen[0]["replicated"].items():
            assert torch.equal(process["replicated"][name], weight), name

    micro_batches = BATCH // (2 * MICRO_BATCH)
    tokens = MICRO_BATCH * context_length
    stream = tokens * WIDTH * FLOAT
    crossings = 2 * LAYERS + 1  # mixers, MLPs, and embedding or output layer
    scores = micro_batches * 2 * tokens * FLOAT  # logarithm of the sum of exponentials, and the target's logit
    norm_and_overflow = 2 * FLOAT
    for process in seen:
        sent = {name: size for (group, name), size in process["sent"].items() if group == "tensor"}
        if sequence_parallel:
            norms = crossings * WIDTH * FLOAT
            assert sent == {
                "allgather_base": micro_batches * 2 * crossings * stream // tensor + scores,
                "reduce_scatter_base": micro_batches * 2 * crossings * stream,
                "allreduce": micro_batches * norms + norm_and_overflow,
            }
        else:
            sums = micro_batches * 2 * crossings * stream + norm_and_overflow
            assert sent == {"allreduce": sums, "allgather_base": scores}


def test_context_parallel_sends_the_same_for_longer_sequences(witness: Callable[..., list[dict]]) -> None:
    context, traffic = 2, []
    for context_length in (22, 66):
        seen = witness(2, context_length, context_size=context, zero_stage=0)
        assert seen[0]["ids"] == seen[1]["ids"]
        traffic.append([{name: size for (_, name), size in process["sent"].items()} for process in seen])
    assert traffic[0] == traffic[1]

    micro_batches = BATCH // MICRO_BATCH
    states = MICRO_BATCH * HEADS * (2 * HEAD_DIM * HEAD_DIM + 1) * FLOAT  # H, G and the log decay
    borrowed = 2 * MICRO_BATCH * 3 * WIDTH * FLOAT  # the last tokens of q and k
    for process in traffic[0]:
        assert process["allgather_base"] == micro_batches * LAYERS * (states + borrowed)
        assert process["reduce_scatter_base"] == micro_batches * LAYERS * context * (states + borrowed)
        assert "send" not in process
    # Beside borrowed tokens the projection of v, or its gradients; beside states the convolution of q: no products.
    one_way_of_each = [("gather", 1), ("gather", 0)] * LAYERS + [("sum", 0), ("sum", 2)] * LAYERS
    assert all(process["beside"] == micro_batches * one_way_of_each for process in seen)


def test_pipeline_sends_the_stream_once_each_way(witness: Callable[..., list[dict]]) -> None:
    context_length, description = 22, 1024  # DeepSpeed's, of the tensors that follow, once an update
    seen = witness(2, context_length, pipeline_size=2)
    assert seen[0]["ids"] == seen[1]["ids"]
    stream = BATCH * context_length * WIDTH * FLOAT
    sent = [process["sent"]["pipeline", "send"] for process in seen]
    assert sent == [stream + description, stream]


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
@pytest.mark.parametrize("sizes", [{}, {"tensor_size": 2}, {"context_size": 2}, {"pipeline_size": 2}], ids=str)
def test_a_process_holds_memory_on_its_own_gpu_alone(witness: Callable[..., list[dict]], sizes: dict[str, int]) -> None:
    assert [process["gpus"] for process in witness(2, 22, **sizes)] == [[0], [1]]
