"""The typed description of one run: every key of a config file, its meaning, unit and default.

Torch-free, so that a login node checks a file in well under a second.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

from pydantic import BeforeValidator, Field
from pydantic_core import PydanticCustomError

from mesatron.config.mixers import (
    AttentionConfig,
    DeltaNetConfig,
    GatedDeltaNetConfig,
    GLAConfig,
    HawkConfig,
    Mamba2Config,
    MesaConfig,
    MesaRLSConfig,
    Mixer,
    MixerConfig,
    MixerPattern,
    MLSTMConfig,
    SWAConfig,
    parse_mixer,
)
from mesatron.config.section import (
    Fraction,
    NonNegativeFloat,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    Section,
)


def _location(value: object) -> str:
    if not isinstance(value, str | Path) or not str(value):
        raise PydanticCustomError("path_type", "should be a path")
    return str(value).removeprefix("file://")


Location = Annotated[str, BeforeValidator(_location)]
"""A folder, or the URL of one."""


class ModelConfig(Section):
    """The backbone shared by every mixer (paper sections E.1 and G.2)."""

    vocabulary_size: PositiveInt
    """Rows of the tied embedding; must equal the tokenizer's."""
    width: PositiveInt
    """Channels of the residual stream."""
    layers: PositiveInt
    """Blocks of mixer and MLP."""
    heads: PositiveInt
    """Mixer heads."""
    head_dim: PositiveInt = 128
    """Channels per head, for keys and values alike."""
    mixer: MixerPattern = "mesa"
    """Sequence mixer of every block, such as `gla` or `swa-256`, or a list of them that repeats over the blocks."""
    mlp_ratio: PositiveFloat = 3.0
    """Width of each SwiGLU branch over the model's width."""
    logit_cap: PositiveFloat = 30.0
    """Logits become cap * tanh(logits / cap)."""
    norm_epsilon: PositiveFloat = 1e-5
    """Added to the mean square inside RMSNorm."""
    implementation: Literal["auto", "torch", "triton"] = "auto"
    """Norms, short convolution, SwiGLU and loss: `triton` needs a GPU; `auto` takes it there, and `torch` elsewhere."""
    mesa: MesaConfig = MesaConfig()
    """Settings of the Mesa mixer."""
    mesa_rls: MesaRLSConfig = MesaRLSConfig()
    """Settings of the original Mesa mixer."""
    gla: GLAConfig = GLAConfig()
    """Settings of GLA."""
    mamba2: Mamba2Config = Mamba2Config()
    """Settings of Mamba2."""
    mlstm: MLSTMConfig = MLSTMConfig()
    """Settings of the mLSTM."""
    deltanet: DeltaNetConfig = DeltaNetConfig()
    """Settings of DeltaNet."""
    gated_deltanet: GatedDeltaNetConfig = GatedDeltaNetConfig()
    """Settings of Gated DeltaNet."""
    hawk: HawkConfig = HawkConfig()
    """Settings of Hawk."""
    transformer: AttentionConfig = AttentionConfig()
    """Settings of softmax attention."""
    swa: SWAConfig = SWAConfig()
    """Settings of sliding-window attention."""

    @property
    def mlp_width(self) -> int:
        """Channels of each SwiGLU branch."""
        return round(self.mlp_ratio * self.width)

    @property
    def mixers(self) -> list[Mixer]:
        """The pattern of mixers, which repeats over the layers."""
        names = self.mixer if isinstance(self.mixer, list) else [self.mixer]
        return [mixer for name in names for mixer in parse_mixer(name)]

    @property
    def used_mixers(self) -> list[str]:
        """Names of the config sections of all mixers that a layer has, each once."""
        return list(dict.fromkeys(self.mixer_of(layer).name for layer in range(self.layers)))

    def mixer_of(self, layer: int) -> Mixer:
        """The mixer of a layer."""
        pattern = self.mixers
        return pattern[layer % len(pattern)]

    def parameter_count(self) -> int:
        """Trainable parameters, the tied embedding counted once."""
        sections: list[MixerConfig] = [getattr(self, self.mixer_of(layer).name) for layer in range(self.layers)]
        mixers = sum(section.parameter_count(self) for section in sections)
        rest = self.layers * (3 * self.width * self.mlp_width + 2 * self.width)
        return self.vocabulary_size * self.width + mixers + rest + self.width


class TokenizerConfig(Section):
    """The tokenizer, and how `mesatron tokenizer train` makes one."""

    path: Path
    """Folder or file of a tokenizer: tokenizer.model (SentencePiece), tokenizer.json, or vocab.json and merges.txt
    (byte-level BPE as GPT-2's)."""
    sample_bytes: PositiveInt = 100_000_000
    """Most text used for training, in bytes of UTF-8; refused where the free memory does not suffice for it."""


class DataConfig(Section):
    """Raw text, prepared shards and the order in which they are read."""

    input_folder: Location
    """Raw records in SlimPajama's form: train/ and validation/ with .jsonl.zst, .jsonl.gz or .jsonl files. A path or a
    URL such as s3://bucket/text."""
    folder: Location
    """Prepared MDS shards, written by `mesatron data prepare`. A path or a URL."""
    context_length: PositiveInt
    """Tokens per sequence."""
    max_skipped_fraction: Fraction = 0.01
    """Preparation fails when more than this share of the records cannot be used."""
    allow_truncated_files: bool = False
    """Use what can be read of compressed input files that end early or are damaged, instead of refusing them."""
    shuffle: bool = True
    """Read the sequences of an epoch in an order drawn from `train.seed`."""
    num_canonical_nodes: PositiveInt = 1
    """Parts in which the order is shuffled apart; part of the data order, so keep it for a run's whole life."""
    shuffle_block_size: PositiveInt = 262_144
    """Sequences shuffled among each other; part of the data order."""
    workers: NonNegativeInt = 1
    """Reader threads of each training process."""
    timeout_seconds: PositiveFloat = 300.0
    """A batch that takes longer ends the run with an error."""
    reset_state_at_documents: bool = False
    """Start every document with an empty mixer state instead of letting state flow across BOS."""
    cache_folder: Path | None = None
    """Where training keeps unpacked shards, one folder for any number of runs; needed where `folder` is a URL or may
    not be written to, and without it they lie in `unpacked` there."""
    cache_limit_bytes: NonNegativeInt = 0
    """Bytes that `cache_folder` may take; 0 for no limit. The least recently used shards go."""
    prefetch_batches: PositiveInt = 2
    """Batches that each reader thread keeps ready."""
    token_folder: Path | None = None
    """Where preparation puts token files and leaves them, so that other lengths, packings and cleaning need no
    tokenizing; needed where `folder` is a URL. Without it they lie beside `folder` until the shards are there."""
    weights: dict[str, NonNegativeFloat] | None = None
    """Share of each source in training, in any unit; sources left out are not read. Without it, as much as there is.
    Documents are then packed by source, so set it before preparing; other values later need no preparing."""
    packing: Literal["concatenate", "best_fit"] = "concatenate"
    """Documents one after another, cut where a sequence is full (the paper's way), or whole where they fit, with the
    rest of a sequence empty."""
    min_document_tokens: NonNegativeInt = 0
    """Preparation leaves out shorter documents; BOS counts."""
    max_document_tokens: NonNegativeInt = 0
    """Preparation leaves out longer documents; 0 for no bound."""
    remove_duplicates: bool = False
    """Preparation leaves out documents whose text has come before, in any file; they are counted either way."""


class TrainConfig(Section):
    """Optimization (paper sections G.1-G.6)."""

    steps: PositiveInt
    """Optimizer steps of the whole run."""
    global_batch_size: PositiveInt
    """Sequences per optimizer step over all processes."""
    micro_batch_size: PositiveInt
    """Sequences per forward pass of one process; accumulation steps follow from it."""
    precision: Literal["bf16", "fp32"] = "bf16"
    """Arithmetic of forward and backward; weights and moments are kept in fp32 either way."""
    peak_lr: PositiveFloat
    """Learning rate after warm-up."""
    start_lr: NonNegativeFloat = 1e-6
    """Learning rate of the first step."""
    final_lr_fraction: Fraction = 0.1
    """Last learning rate over the peak."""
    warmup_steps: NonNegativeInt = 2000
    """Steps of linear warm-up."""
    schedule: Literal["cosine", "wsd"] = "cosine"
    """After warm-up: cosine to the end, or stable and then linear decay."""
    decay_fraction: Annotated[float, Field(gt=0, le=1)] = 0.2
    """Share of all steps that the decay of `wsd` takes."""
    beta1: Annotated[float, Field(ge=0, lt=1)] = 0.9
    """AdamW's decay of the first moment."""
    beta2: Annotated[float, Field(ge=0, lt=1)] = 0.98
    """AdamW's decay of the second moment."""
    epsilon: PositiveFloat = 1e-8
    """AdamW's denominator term."""
    weight_decay: NonNegativeFloat = 0.1
    """AdamW's decoupled decay, on matrices only: not on embeddings, norms, biases or Lambda."""
    clip_grad_norm: PositiveFloat = 1.0
    """Gradients with a larger global norm are scaled down to it."""
    activation_checkpointing: Literal["none", "selective", "full"] = "none"
    """Activations made again in the backward pass instead of kept: none, those of the MLPs, or all but blocks' inputs.
    `selective` spares the solver, `full` runs it twice."""
    cuda_graphs: bool = False
    """Record each block's passes once, on GPUs, and launch each as a whole: worth it where a step waits for Python, as
    with few tokens in a micro-batch. Activations then keep their memory between steps, and gradients of weights take
    some for each micro-batch that is under way."""
    loss_chunk_tokens: PositiveInt = 8192
    """Tokens whose logits exist at a time; bounds memory at large vocabularies."""
    max_skipped_steps: PositiveInt = 10
    """So many non-finite gradients in a row end the run."""
    seed: NonNegativeInt = 0
    """Decides initial weights and data order."""
    watchdog_seconds: NonNegativeFloat = 300.0
    """A run in which nothing moves for so long, or a process shows no sign of life, ends with exit code 77, within a
    third of it more; 0 lets it hang. Before its first step and while it goes back after a spike, a process that does
    not move is given 30 minutes at least; one that is stopped or gone is not."""
    dump_nonfinite: bool = True
    """After a skipped step, the first in a row, write the inputs of the layer where non-finite numbers began to a file
    in `nonfinite/`, for `mesatron replay`."""
    spike_sigma: NonNegativeFloat = 0.0
    """A loss so many standard deviations above the trend of those before is a spike; 0 looks for none, 6 is usual."""
    spike_steps: PositiveInt = 3
    """A spike of so many steps sends the run back to a checkpoint before it, to go on without the spike's batches."""
    max_rewinds: NonNegativeInt = 2
    """So often a run goes back; one more spike ends it."""

    @property
    def decay_steps(self) -> int:
        """Steps that the decay of `wsd` takes."""
        return max(1, round(self.decay_fraction * self.steps))


class ParallelConfig(Section):
    """How one run is spread over processes: tensor x context x data x pipeline of them (docs/parallelism.md)."""

    tensor_size: PositiveInt = 1
    """Processes that share every matrix, by heads and by channels of the MLP."""
    sequence_parallel: bool = False
    """Between the matrices, split the tokens over the tensor-parallel processes too: less memory, equal traffic."""
    context_size: PositiveInt = 1
    """Processes that share every sequence, each with a piece of its tokens."""
    pipeline_size: PositiveInt = 1
    """Processes that share the blocks, each with a run of them."""
    data_size: NonNegativeInt = 0
    """Groups of processes that read different sequences; 0 takes as many as the processes make."""
    zero_stage: Literal[0, 1, 2, 3] = 1
    """DeepSpeed ZeRO: shard nothing (0), optimizer state (1), gradients too (2), weights too (3)."""
    offload_optimizer: bool = False
    """Keep fp32 weights and moments in host memory and update them there; needs `zero_stage` 1 to 3, no pipeline."""

    @property
    def model_size(self) -> int:
        """Processes that hold one copy of the model or read one sequence together."""
        return self.tensor_size * self.context_size * self.pipeline_size


class CheckpointConfig(Section):
    """When state is saved and how long it is kept."""

    every_steps: PositiveInt = 1000
    """Steps between checkpoints; the last step is always saved."""
    keep_last: PositiveInt = 3
    """Newest checkpoints that stay; with `train.spike_sigma` more than a spike can spoil, or none is left to go to."""
    keep_every_steps: NonNegativeInt = 0
    """Checkpoints at multiples of this, itself one of `every_steps`, stay for ever; 0 keeps none beyond `keep_last`."""
    asynchronous: bool = True
    """Write behind training, from a copy in host memory: 12 bytes for every parameter that a process saves."""
    local_folder: Path | None = None
    """Folder on a disk or in the memory of every node, for more frequent checkpoints that go with the node; they take
    another copy in host memory."""
    local_every_steps: NonNegativeInt = 0
    """Steps between those; needs `local_folder`."""


class MonitorConfig(Section):
    """What is written to TensorBoard, metrics.jsonl and the terminal."""

    log_every_steps: PositiveInt = 1
    """Steps between scalar points."""
    histogram_every_steps: PositiveInt = 100
    """Steps between gate and Lambda histograms."""
    profile_step: NonNegativeInt = 0
    """The step whose trace every process writes into the run folder's profile/; 0 for none. Its seconds and its shares
    of computing and communicating are profile/*; time that the first process waits for others is communicating."""
    straggler_ratio: NonNegativeFloat = 1.5
    """A process whose data and forward pass take so many times the median's is named; 0 names none."""


class EvaluateConfig(Section):
    """Validation during training and `mesatron evaluate`."""

    every_steps: PositiveInt = 1000
    """Steps between validations; the untrained model and the last step are always validated."""
    max_sequences: NonNegativeInt = 0
    """Validation sequences used during training; 0 takes all."""
    micro_batch_size: PositiveInt = 8
    """Sequences per forward pass of one process."""


class LaunchConfig(Section):
    """How a run is started on a cluster, stopped there and started again."""

    stop_signal: Literal["USR1", "USR2", "TERM", "HUP"] = "USR1"
    """Signal by which the cluster asks a run to save and end; TERM is always heard too."""
    max_requeues: NonNegativeInt = 10
    """A job starts again, after a failure or when the cluster asked it to stop, at most so many times without a new
    checkpoint; 0 never starts one again."""
    lead_seconds: NonNegativeInt = 0
    """How long before its time limit a job gets the signal; 0 takes it from the run's measured saves and steps."""
    processes_per_node: NonNegativeInt = 0
    """Processes on every node; 0 takes one for each GPU that Slurm gives a node, or one."""
    preflight_seconds: NonNegativeInt = 120
    """`mesatron doctor run` may take so long on the nodes before training begins; 0 leaves it out."""


class Config(Section):
    """One run."""

    name: Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$")]
    """Name of the run; its folder is `runs_folder`/`name`."""
    runs_folder: Path = Path("runs")
    """Where run folders lie."""
    model: ModelConfig
    tokenizer: TokenizerConfig
    data: DataConfig
    train: TrainConfig
    parallel: ParallelConfig = ParallelConfig()
    checkpoint: CheckpointConfig = CheckpointConfig()
    monitor: MonitorConfig = MonitorConfig()
    evaluate: EvaluateConfig = EvaluateConfig()
    launch: LaunchConfig = LaunchConfig()

    @property
    def run_folder(self) -> Path:
        """Everything the run writes."""
        return self.runs_folder / self.name

    @property
    def tokens_per_step(self) -> int:
        """Target positions of one optimizer step over all processes."""
        return self.train.global_batch_size * self.data.context_length
