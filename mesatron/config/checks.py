"""Checks across fields; every message shows the arithmetic."""

from __future__ import annotations

from pathlib import Path

from mesatron_data.manifest import Manifest
from mesatron_data.store import is_remote

from mesatron.config.schema import Config, ModelConfig
from mesatron.errors import ConfigError, DataError


def check(config: Config, path: Path) -> None:
    """Raise ConfigError when fields of `config`, read from `path`, do not fit together."""
    for problem in _problems(config):
        raise ConfigError(f"{path}: {problem}")


def pattern_problem(model: ModelConfig) -> str | None:
    """Why `model.mixer` does not fit into `model.layers`, if it does not: it would lose its last mixers in silence."""
    pattern = model.mixers
    if len(pattern) <= model.layers:
        return None
    return f"{' + '.join(map(str, pattern))} = {len(pattern)} mixers do not fit into {model.layers} layers"


def _problems(config: Config):
    model, train, data = config.model, config.train, config.data
    if model.heads * model.head_dim != model.width:
        yield (
            f"model.heads x model.head_dim must equal model.width, but {model.heads} x {model.head_dim} = "
            f"{model.heads * model.head_dim}, not {model.width}."
        )
    if model.mlp_width == 0:
        yield f"model.mlp_ratio x model.width must be at least 1, but {model.mlp_ratio} x {model.width} rounds to 0."
    if problem := pattern_problem(model):
        yield f"model.mixer must not be longer than model.layers, but {problem}."
    if train.global_batch_size % train.micro_batch_size:
        yield (
            f"train.global_batch_size must be a multiple of train.micro_batch_size, but {train.global_batch_size} = "
            f"{train.global_batch_size // train.micro_batch_size} x {train.micro_batch_size} + "
            f"{train.global_batch_size % train.micro_batch_size}."
        )
    if train.warmup_steps >= train.steps:
        yield f"train.warmup_steps ({train.warmup_steps}) must be fewer than train.steps ({train.steps})."
    if train.schedule == "wsd" and train.warmup_steps + train.decay_steps >= train.steps:
        yield (
            f"train.warmup_steps + train.decay_fraction x train.steps must leave a step of train.steps between them, "
            f"but {train.warmup_steps} + {train.decay_fraction} x {train.steps} = "
            f"{train.warmup_steps + train.decay_steps} of {train.steps}."
        )
    if train.start_lr > train.peak_lr:
        yield f"train.start_lr ({train.start_lr}) must not exceed train.peak_lr ({train.peak_lr})."
    for name, mesa in (("mesa", model.mesa), ("mesa_rls", model.mesa_rls)):
        if mesa.lambda_initial <= mesa.lambda_lower_bound:
            yield (
                f"model.{name}.lambda_initial ({mesa.lambda_initial}) must exceed model.{name}.lambda_lower_bound "
                f"({mesa.lambda_lower_bound})."
            )
    for section, key, unit_key in (
        ("monitor", "histogram_every_steps", "log_every_steps"),
        ("checkpoint", "keep_every_steps", "every_steps"),
    ):
        steps, unit = (getattr(getattr(config, section), name) for name in (key, unit_key))
        if steps % unit:
            yield f"{section}.{key} must be a multiple of {section}.{unit_key}, but {steps} is none of {unit}."
    if config.monitor.profile_step > train.steps:
        yield f"monitor.profile_step ({config.monitor.profile_step}) must not exceed train.steps ({train.steps})."
    # Those of the step before the spike and of its own steps are removed when the run goes back.
    spoilt = -(-(train.spike_steps + 1) // config.checkpoint.every_steps)
    if train.spike_sigma and train.max_rewinds and config.checkpoint.keep_last <= spoilt:
        yield (
            f"checkpoint.keep_last ({config.checkpoint.keep_last}) must exceed the checkpoints that a spike spoils, "
            f"but of train.spike_steps + 1 = {train.spike_steps + 1} steps up to {spoilt} are saved with "
            f"checkpoint.every_steps = {config.checkpoint.every_steps}."
        )
    if (config.checkpoint.local_folder is None) != (config.checkpoint.local_every_steps == 0):
        yield (
            f"checkpoint.local_folder ({config.checkpoint.local_folder}) and checkpoint.local_every_steps "
            f"({config.checkpoint.local_every_steps}) must be set together."
        )
    if train.cuda_graphs:
        yield from _graph_problems(config)
    yield from _parallel_problems(config)
    if data.folder == data.input_folder:
        yield f"data.folder and data.input_folder are both {data.folder}; shards need a folder of their own."
    if is_remote(data.folder) and data.cache_folder is None:
        yield f"data.folder {data.folder} is a URL; name a folder on each machine for its shards in data.cache_folder."
    if data.max_document_tokens and data.max_document_tokens < data.min_document_tokens:
        yield (
            f"data.max_document_tokens ({data.max_document_tokens}) must not be less than data.min_document_tokens "
            f"({data.min_document_tokens})."
        )
    if data.cache_limit_bytes and data.cache_folder is None:
        yield f"data.cache_limit_bytes is {data.cache_limit_bytes}, but there is no data.cache_folder to hold to it."


def _graph_problems(config: Config):
    for holds, key, needed in (
        (config.parallel.zero_stage in (1, 2), "parallel.zero_stage", "1 or 2"),
        (config.train.activation_checkpointing != "full", "train.activation_checkpointing", "none or selective"),
        (not config.data.reset_state_at_documents, "data.reset_state_at_documents", "false"),
    ):
        if not holds:
            section, _, name = key.partition(".")
            found = str(getattr(getattr(config, section), name)).lower()
            yield f"train.cuda_graphs needs {key} {needed}, not {found}; change it or set train.cuda_graphs to false."


def _parallel_problems(config: Config):
    parallel, model = config.parallel, config.model
    for key, number in (("heads", model.heads), ("mlp_width", model.mlp_width)):
        if number % parallel.tensor_size:
            yield (
                f"model.{key} must be a multiple of parallel.tensor_size, but {number} = "
                f"{number // parallel.tensor_size} x {parallel.tensor_size} + {number % parallel.tensor_size}."
            )
    if parallel.sequence_parallel and parallel.tensor_size == 1:
        yield "parallel.sequence_parallel needs parallel.tensor_size above 1; raise it or turn the other off."
    context_length, pieces = config.data.context_length, parallel.context_size
    token_parts = pieces * (parallel.tensor_size if parallel.sequence_parallel else 1)
    if context_length % token_parts:
        factors = "parallel.context_size" + (" x parallel.tensor_size" if parallel.sequence_parallel else "")
        yield (
            f"data.context_length must be a multiple of {factors}, but {context_length} = "
            f"{context_length // token_parts} x {token_parts} + {context_length % token_parts}."
        )
    borrowed = max(getattr(getattr(model, name), "convolution_width", 1) for name in model.used_mixers) - 1
    if pieces > 1 and context_length // pieces < borrowed:
        yield (
            f"data.context_length / parallel.context_size = {context_length} / {pieces} = {context_length // pieces} "
            f"tokens are fewer than the {borrowed} that a convolution of width {borrowed + 1} borrows."
        )
    if parallel.pipeline_size > model.layers:
        yield (
            f"parallel.pipeline_size must not exceed model.layers, but {parallel.pipeline_size} stages would share "
            f"{model.layers} blocks."
        )
    if parallel.pipeline_size > 1 and parallel.zero_stage != 1:
        yield (
            f"parallel.pipeline_size {parallel.pipeline_size} needs parallel.zero_stage 1, not {parallel.zero_stage}: "
            "ZeRO-2 and 3 cannot shard a pipeline's gradients, and ZeRO-0 clips them by a wrong norm."
        )
    if parallel.offload_optimizer and (parallel.zero_stage == 0 or parallel.pipeline_size > 1):
        yield (
            f"parallel.offload_optimizer needs parallel.zero_stage 1 to 3 and parallel.pipeline_size 1, not "
            f"{parallel.zero_stage} and {parallel.pipeline_size}."
        )


def data_parallel_size(config: Config, processes: int) -> int:
    """Groups of processes that read different sequences.

    Raises ConfigError with the arithmetic when `processes` is not the product of the sizes in `parallel`.
    """
    parallel = config.parallel
    model_size = parallel.model_size
    sizes = (
        f"parallel.tensor_size x context_size x pipeline_size = {parallel.tensor_size} x {parallel.context_size} x "
        f"{parallel.pipeline_size} = {model_size}"
    )
    if processes % model_size:
        raise ConfigError(
            f"The number of processes must be a multiple of {sizes}, but it is {processes}; change the sizes or start "
            "another number of processes."
        )
    if parallel.data_size and parallel.data_size * model_size != processes:
        raise ConfigError(
            f"parallel.data_size {parallel.data_size} times {sizes} calls for {parallel.data_size * model_size} "
            f"processes, not {processes}; set parallel.data_size to 0 or {processes // model_size}, or start "
            f"{parallel.data_size * model_size}."
        )
    return processes // model_size


def accumulation_steps(config: Config, data_parallel_size: int) -> int:
    """Micro batches per process and optimizer step.

    Raises ConfigError with the arithmetic when the global batch does not split evenly over `data_parallel_size`.
    """
    train = config.train
    per_pass = train.micro_batch_size * data_parallel_size
    if train.global_batch_size % per_pass:
        raise ConfigError(
            f"train.global_batch_size must be micro_batch_size x accumulation x data-parallel size, but "
            f"{train.global_batch_size} is no multiple of {train.micro_batch_size} x {data_parallel_size} = "
            f"{per_pass}; change the batch sizes or the number of processes."
        )
    return train.global_batch_size // per_pass


def check_prepared(config: Config, manifest: Manifest, folder: str) -> None:
    """Compare the config with the prepared shards in `folder`; raises DataError with both numbers."""
    for key, asked, found in (
        ("data.context_length", config.data.context_length, manifest.context_length),
        ("data.packing", config.data.packing, manifest.packing),
        ("model.vocabulary_size", config.model.vocabulary_size, manifest.vocabulary_size),
    ):
        if asked != found:
            raise DataError(
                f"{key} is {asked}, but {folder} was prepared with {found}; change it or prepare again with "
                "--overwrite."
            )
