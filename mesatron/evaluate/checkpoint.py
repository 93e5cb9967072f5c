"""A trained model out of its checkpoint: loaded onto one device, and measured there."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from mesatron_data.batch import Batch
from mesatron_data.manifest import load_manifest
from mesatron_data.stream import ValidationSet
from torch import Tensor

from mesatron.checkpoint.reader import CheckpointReader, open_checkpoint
from mesatron.config import Config, check_prepared, load_stored_config
from mesatron.errors import ConfigError, DataError
from mesatron.evaluate.perplexity import Perplexity, measure
from mesatron.kernel_choice import choose_kernels, with_kernels
from mesatron.model.backbone import Backbone
from mesatron.parallel.distributed import World
from mesatron.parallel.layout import Layout


@dataclass(frozen=True)
class TrainedModel:
    """Weights in evaluation mode, the config they were trained with, and the checkpoint they come from."""

    model: Backbone
    config: Config
    checkpoint: CheckpointReader
    device: torch.device

    def check_tokenizer(self, sha256: str, folder: str) -> None:
        """Raise DataError when `sha256`, the tokenizer of `folder`, is not the one the model was trained with."""
        if sha256 != self.checkpoint.state["tokenizer_sha256"]:
            raise DataError(
                f"{folder} has another tokenizer than {self.checkpoint.folder} was trained with; use the shards of "
                "that training, or others made with its tokenizer."
            )


def load_model(path: Path, solver: dict[str, Any] | None = None) -> TrainedModel:
    """The model of a checkpoint or of a run's newest one, on the GPU if there is one; `solver` replaces settings of its
    Mesa layers.

    Weights are in bf16 where the run trained in it. Kernels are those that fit this machine, whatever the run trained
    with. Raises CheckpointError when there is none that verifies, ConfigError when its config is not one of this
    version or when there are settings for Mesa layers and no such layers.
    """
    reader = open_checkpoint(path)
    config = load_stored_config(reader.folder / "config.yaml")
    mixers = config.model.used_mixers
    if solver and not {"mesa", "mesa_rls"} & set(mixers):
        raise ConfigError(
            f"{reader.folder} has no mixer with a solver (it has {', '.join(mixers)}); leave out {', '.join(solver)}."
        )
    sections: dict[str, Any] = {"implementation": "auto"}
    for name in mixers:
        settings = {"implementation": "auto"} | (solver or {} if name in ("mesa", "mesa_rls") else {})
        sections[name] = getattr(config.model, name).model_copy(update=settings)
    config = config.model_copy(update={"model": config.model.model_copy(update=sections)})
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    model = Backbone(with_kernels(config, choose_kernels(config, device)).model)
    reader.check_model({name: tuple(p.shape) for name, p in model.named_parameters()})
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(reader.tensor("weights", name))
    dtype = torch.bfloat16 if config.train.precision == "bf16" else torch.float32
    return TrainedModel(model.to(device, dtype).eval(), config, reader, device)


def evaluate_perplexity(
    trained: TrainedModel, data_folder: str | None = None, progress: Callable[[int, int], None] = lambda *_: None
) -> Perplexity:
    """Perplexity on the whole validation split of the run's own data, or of `data_folder`.

    `progress` gets how many batches of how many are done. Raises DataError when the shards do not fit the model, or its
    own are not those that it was trained on any more.
    """
    config = trained.config
    folder = data_folder or config.data.folder
    manifest = load_manifest(folder)
    check_prepared(config, manifest, folder)
    trained.check_tokenizer(manifest.tokenizer_sha256, folder)
    if data_folder is None and manifest.fingerprint != trained.checkpoint.state["data"]["fingerprint"]:
        raise DataError(
            f"{folder} holds other data now than {trained.checkpoint.folder} was trained on; to measure on these all "
            f"the same, give --data {folder}."
        )

    def losses(tokens: Tensor, targets: Tensor, cu_seqlens: Tensor) -> Tensor:
        documents = cu_seqlens.to(trained.device) if config.data.reset_state_at_documents else None
        chunk_tokens = config.train.loss_chunk_tokens
        return trained.model(tokens.to(trained.device), targets.to(trained.device), documents, chunk_tokens)

    data = config.data
    validation = ValidationSet(
        folder, config.evaluate.micro_batch_size, cache_folder=data.cache_folder,
        cache_limit_bytes=data.cache_limit_bytes,
    )  # fmt: skip

    def batches() -> Iterator[Batch]:
        for done, batch in enumerate(validation):
            progress(done, len(validation))
            yield batch
        progress(len(validation), len(validation))

    return measure(losses, batches(), manifest, Layout(World(0, 1, trained.device)))
