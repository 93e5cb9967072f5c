"""The mixers' names, settings and patterns over layers. Torch-free."""

from __future__ import annotations

import difflib
import re
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal, NamedTuple, Protocol

from pydantic import BeforeValidator, Field
from pydantic_core import PydanticCustomError

from mesatron.config.section import NonNegativeFloat, PositiveFloat, PositiveInt, Section

if TYPE_CHECKING:
    from mesatron.config.schema import ModelConfig

KernelChoice = Literal["auto", "reference", "torch", "fla"]


class MixerConfig(Protocol):
    """What the config knows of a mixer: its settings and how many parameters it adds to a block."""

    def parameter_count(self, model: ModelConfig) -> int:
        """Parameters of one layer of this mixer inside `model`."""
        ...


class MesaRLSConfig(Section):
    """The Mesa mixer without a forget gate (arXiv 2309.05858): recursive least squares over all tokens.

    Its `reference` is the sequential recursion; other implementations are the Mesa operator with a forget gate of 1.
    """

    gates: ClassVar[int] = 1

    lambda_lower_bound: NonNegativeFloat = 0.25
    """Lambda = bound + softplus(theta), per head and channel."""
    lambda_initial: PositiveFloat = 1.0
    """Lambda before the first step; must exceed the lower bound."""
    convolution_width: PositiveInt = 4
    """Tokens seen by the causal depthwise convolution on q and k."""
    solver_steps: PositiveInt = 30
    """Most conjugate gradient steps of a solve, forward and backward."""
    solver_tolerance: Annotated[float, Field(ge=0, lt=1)] = 1e-4
    """A token's solve stops at this residual, relative to its right-hand side; 0 always takes `solver_steps`."""
    chunk_size: PositiveInt = 64
    """Tokens per chunk of the parallel form; changes speed and rounding, not the result."""
    implementation: Literal["auto", "reference", "torch", "triton"] = "auto"
    """Operator implementation: `triton` needs a GPU; `auto` takes it where its self-check passes, else `torch`."""

    def parameter_count(self, model: ModelConfig) -> int:
        """q, k, v and output projections, gates with bias, two convolutions, Lambda and the per-head norm."""
        return _linear_count(model, self.convolution_width, self.gates) + model.heads * model.head_dim


class MesaConfig(MesaRLSConfig):
    """The Mesa mixer (arXiv 2506.05233, sections 2, E, G.2 and G.5)."""

    gates = 2

    gamma_cap: Annotated[float, Field(gt=0, le=1)] = 0.9975
    """Largest forget gate when the input gate is 1: gamma = gamma_raw (1 - (1 - cap) beta^2); 1 leaves it uncapped."""
    implementation: Literal["auto", "reference", "torch", "triton", "fla"] = "auto"  # type: ignore[assignment]
    """Operator implementation: `triton` needs a GPU; `auto` takes it where its self-check passes, else `torch`; `fla`,
    fla-core's kernel, is there to be compared with: it always takes `solver_steps`, and loses small gradients."""


class LinearMixerConfig(Section):
    """A mixer on the shared input path (arXiv 2506.05233, section E.1) whose state is a matrix per head."""

    gates: ClassVar[int]

    convolution_width: PositiveInt = 4
    """Tokens seen by the causal depthwise convolution on q and k."""
    chunk_size: PositiveInt = 64
    """Tokens per chunk of the torch form; changes speed and rounding, not the result."""
    implementation: KernelChoice = "auto"
    """`fla` needs a GPU and fla-core; `auto` takes it where it is right, else `torch`; `reference` goes by tokens."""

    def parameter_count(self, model: ModelConfig) -> int:
        """q, k, v and output projections, gates with bias, two convolutions and the per-head norm."""
        return _linear_count(model, self.convolution_width, self.gates)


class GLAConfig(LinearMixerConfig):
    """Linear attention with a scalar forget gate and a scalar input gate (table 1)."""

    gates = 2


class Mamba2Config(LinearMixerConfig):
    """Linear attention with a scalar forget gate (table 1)."""

    gates = 1


class DeltaNetConfig(LinearMixerConfig):
    """The delta rule (table 1)."""

    gates = 1


class GatedDeltaNetConfig(LinearMixerConfig):
    """The delta rule with a scalar forget gate (table 1)."""

    gates = 2


class MLSTMConfig(LinearMixerConfig):
    """xLSTM's mLSTM: exponential input gate, normaliser, no L2 norm of q and k (arXiv 2405.04517)."""

    gates = 2

    implementation: Literal["auto", "reference", "torch"] = "auto"
    """`auto` is `torch`, on a GPU too; `reference` loops over tokens."""


class HawkConfig(Section):
    """Hawk's RG-LRU block (arXiv 2402.19427)."""

    width_multiplier: PositiveFloat = 1.25
    """Channels of the recurrence over those of a head, rounded for every block: the paper's 1.25."""
    blocks_per_head: PositiveInt = 2
    """Blocks of the block-diagonal gates for each of `model.heads`, by which tensor parallelism splits the channels."""
    convolution_width: PositiveInt = 4
    """Tokens seen by the causal depthwise convolution before the recurrence."""
    chunk_size: PositiveInt = 64
    """Tokens per chunk of the torch form; changes speed and rounding, not the result."""
    implementation: KernelChoice = "auto"
    """`fla` needs a GPU and fla-core; `auto` takes it there, else `torch`; `reference` loops over tokens."""

    def block_width(self, head_dim: int) -> int:
        """Channels of a block of the gates."""
        return max(1, round(self.width_multiplier * head_dim / self.blocks_per_head))

    def parameter_count(self, model: ModelConfig) -> int:
        """Two input projections and the output's, convolution, decay, and two block-diagonal gates with bias."""
        size = self.block_width(model.head_dim)
        channels = model.heads * self.blocks_per_head * size
        return channels * (3 * model.width + self.convolution_width + 1 + 2 * size + 2)


class AttentionConfig(Section):
    """Softmax attention with RoPE."""

    rope_base: PositiveFloat = 10_000.0
    """Base of the rotations' wavelengths."""
    implementation: Literal["auto", "reference", "torch", "flex"] = "auto"
    """`torch`: scaled_dot_product_attention, which chooses its kernel, with a mask of all pairs for documents; `flex`:
    FlexAttention for documents and windows; `auto` is `flex` on a GPU, for heads of a multiple of 16;
    `reference` writes the softmax out."""

    def parameter_count(self, model: ModelConfig) -> int:
        """q, k, v and output projections."""
        return 4 * model.width * model.heads * model.head_dim


class SWAConfig(AttentionConfig):
    """Softmax attention with RoPE over a window."""

    window: PositiveInt = 1024
    """Tokens that a token sees, itself included; a pattern names another one as `swa-256`."""


def _linear_count(model: ModelConfig, convolution_width: int, gates: int) -> int:
    inner = model.heads * model.head_dim
    gate = model.width * model.heads + model.heads
    return 4 * model.width * inner + gates * gate + 2 * inner * convolution_width + inner


class Mixer(NamedTuple):
    """The mixer of a layer: the name of its config section, and of `swa-N` the window, else None."""

    name: str
    window: int | None = None

    def __str__(self) -> str:
        return f"{self.name}-{self.window}" if self.window else self.name


SECTIONS = (
    "mesa", "transformer", "swa", "gla", "mamba2", "mlstm", "deltanet", "gated_deltanet", "hawk", "mesa_rls",
)  # fmt: skip
"""Mixers that have a config section of their name."""
PATTERNS = {"hawk_mesa": ["hawk", "mesa"]}
"""Names of patterns. The paper alternates the two and does not say which comes first; here it is Hawk."""


WINDOW = re.compile("[1-9][0-9]{0,8}")


def parse_mixer(name: str) -> list[Mixer]:
    """The mixers that a name stands for. Raises ValueError, naming the nearest known name."""
    if name in PATTERNS:
        return [mixer for part in PATTERNS[name] for mixer in parse_mixer(part)]
    if name in SECTIONS:
        return [Mixer(name)]
    base, dash, window = name.replace("_", "-").partition("-")
    if base == "swa" and dash:
        if not WINDOW.fullmatch(window):
            raise ValueError(f"in swa-N, N is a whole number from 1 to {10**9 - 1:,}")
        if name != f"swa-{window}":
            raise ValueError(f"did you mean 'swa-{window}'?")
        return [Mixer("swa", int(window))]
    known = [*SECTIONS, *PATTERNS]
    near = difflib.get_close_matches(name, known, n=1, cutoff=0.5)
    hint = f"did you mean '{near[0]}'?" if near else f"known are {', '.join(known)} and swa-N"
    raise ValueError(hint)


def _mixer_pattern(value: Any) -> Any:
    names = value if isinstance(value, list) else [value]
    if not names:
        raise PydanticCustomError("mixer", "should name at least one mixer")
    for name in names:
        if not isinstance(name, str):
            raise PydanticCustomError("mixer", "should be the name of a mixer or a list of names")
        try:
            parse_mixer(name)
        except ValueError as error:
            raise PydanticCustomError("mixer", "{problem}", {"problem": f"'{name}' is no mixer; {error}"}) from None
    return value


MixerPattern = Annotated[str | list[str], BeforeValidator(_mixer_pattern)]
"""A mixer's name, or names that repeat over the layers."""
