"""Train a SentencePiece tokenizer on a sample of the training text (`mesatron tokenizer train`).

The sample is drawn by document and is, like the model, a function of the input, the settings and the SentencePiece
version alone. Its size is bounded; what it takes of memory is compared with what is free before anything is read.
"""

import io
import json
import unicodedata
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

import sentencepiece

from mesatron_data.draw import Limits, draw_documents
from mesatron_data.errors import DataError
from mesatron_data.files import remove_partial, sha256, write_atomically, writing
from mesatron_data.progress import Report
from mesatron_data.records import check_skipped, check_truncated, list_files
from mesatron_data.tokenizer import INFO_FILE, MODEL_FILE, Tokenizer

# The trainer drops longer lines (its limit is 4192 bytes); ours are cut at a space before that.
LINE_CHARACTERS = 1000
# Measured: 10 bytes on 30 MB of mixed English and code, and 100 MB at rest; text that repeats no word takes 27.
MEMORY_PER_SAMPLE_BYTE = 12
MEMORY_AT_REST = 200_000_000


@dataclass(frozen=True)
class SourceSample:
    """Bytes of UTF-8 text that a source has, and that the trainer saw of it."""

    bytes: int
    sample_bytes: int


@dataclass(frozen=True)
class TokenizerInfo:
    """How a tokenizer was trained, as written to training.json.

    `sample_bytes` counts the UTF-8 bytes the trainer saw; `request` identifies what it was asked for.
    """

    sha256: str
    vocabulary_size: int
    bos_id: int
    seed: int
    sample_bytes: int
    sample_documents: int
    documents: int
    sources: dict[str, SourceSample]
    sentencepiece_version: str
    request: str


def tokenizer_request(
    input_folder: str,
    vocabulary_size: int,
    seed: int,
    max_sample_bytes: int,
    weights: Mapping[str, float] | None = None,
) -> str:
    """Return what identifies a call of `train_tokenizer`: settings and names, sizes and times of its input files."""
    inputs = [(file.name, file.bytes, file.modified) for file in list_files(input_folder, "train")]
    settings: tuple[object, ...] = (inputs, vocabulary_size, seed, max_sample_bytes)
    if weights is not None:
        settings += (sorted(weights.items()),)
    return sha256(repr(settings).encode())


def train_tokenizer(
    input_folder: str,
    output_folder: str | Path,
    vocabulary_size: int,
    seed: int = 0,
    max_sample_bytes: int = 100_000_000,
    max_skipped_fraction: float = 0.01,
    allow_truncated_files: bool = False,
    weights: Mapping[str, float] | None = None,
    workers: int = 1,
    progress: Report | None = None,
) -> TokenizerInfo:
    """Train on a random sample of `input_folder`/train and write tokenizer.model and training.json to `output_folder`.

    The sample has at most `max_sample_bytes` of UTF-8 text. With `weights` each source gives its share of that, less
    where it has less text, and sources without a weight give none; else every document is as likely as any other.
    `workers` processes read the text, or as many as there is memory for; they change nothing of the result.
    Raises DataError for unusable input, a sample that the free memory cannot hold, weights of sources that the text
    does not have or that are all 0, or a vocabulary that the text cannot fill; DiskFullError when there is no space.
    """
    output_folder, text_folder = Path(output_folder), f"{input_folder}/train"
    limits = _limits(max_sample_bytes, weights)
    samples = processes_with_memory(max_sample_bytes, free_memory())
    drawn = draw_documents(input_folder, limits, _bytes, f"{seed} ", min(workers, samples), progress)
    counts, sample = drawn.counts, [document.text for document in drawn.documents]
    check_truncated(counts.truncated, allow_truncated_files)
    check_skipped(counts.documents, counts.skipped, counts.places, max_skipped_fraction, text_folder)
    _check_sources(weights or {}, drawn.found, text_folder)
    seen = dict.fromkeys(sorted(drawn.found), 0)
    for document in drawn.documents:
        seen[document.source] += _bytes(document.text)
    sources = {name: SourceSample(drawn.found[name], seen[name]) for name in seen}
    model = io.BytesIO()
    try:
        sentencepiece.SentencePieceTrainer.train(
            sentence_iterator=(line for text in sample for line in lines_of(text)),
            model_writer=model,
            model_type="bpe",
            vocab_size=vocabulary_size,
            byte_fallback=True,
            normalization_rule_name="identity",
            add_dummy_prefix=False,
            remove_extra_whitespaces=False,
            allow_whitespace_only_pieces=True,
            split_digits=True,
            character_coverage=0.9995,
            unk_id=0,
            bos_id=1,
            eos_id=-1,
            pad_id=-1,
            num_threads=1,
            minloglevel=2,
        )
    except RuntimeError as error:
        reason = str(error).rpartition("] ")[2].strip().rstrip(".")  # after its source line and condition
        raise DataError(
            f"Cannot train a tokenizer of {vocabulary_size} pieces on {input_folder}/train: {reason}; give "
            "more text or choose another size."
        ) from error
    tokenizer = Tokenizer(model.getvalue(), output_folder / MODEL_FILE)
    info = TokenizerInfo(
        sha256=tokenizer.sha256,
        vocabulary_size=tokenizer.vocabulary_size,
        bos_id=tokenizer.bos_id,
        seed=seed,
        sample_bytes=sum(source.sample_bytes for source in sources.values()),
        sample_documents=len(sample),
        documents=counts.documents,
        sources=sources,
        sentencepiece_version=sentencepiece.__version__,
        request=tokenizer_request(input_folder, vocabulary_size, seed, max_sample_bytes, weights),
    )
    with writing(output_folder):
        output_folder.mkdir(parents=True, exist_ok=True)
        remove_partial(output_folder)
        # The description goes first: a model beside a description of another one is refused by Tokenizer.load.
        write_atomically(output_folder / INFO_FILE, json.dumps(asdict(info), indent=2).encode() + b"\n")
        write_atomically(output_folder / MODEL_FILE, tokenizer.model)
    return info


def free_memory() -> int:
    """Return the bytes of memory that this process may still take: of the machine, or of its control group."""
    kilobytes = {line.split(":")[0]: line.split()[1] for line in Path("/proc/meminfo").read_text().splitlines()}
    free = int(kilobytes["MemAvailable"]) * 1024
    try:
        group = Path("/sys/fs/cgroup")
        limit = int((group / "memory.max").read_text())
        free = min(free, limit - int((group / "memory.current").read_text()))
    except (OSError, ValueError):
        pass  # there is no such group, or no limit
    return free


def processes_with_memory(sample_bytes: int, free_bytes: int) -> int:
    """Return how many processes may hold a sample while it is drawn: each as much as training on it takes.

    Raises DataError when there is no memory for one.
    """
    needed = MEMORY_AT_REST + MEMORY_PER_SAMPLE_BYTE * sample_bytes
    if needed > free_bytes:
        fits = max(0, free_bytes - MEMORY_AT_REST) // MEMORY_PER_SAMPLE_BYTE
        raise DataError(
            f"A tokenizer sample of {sample_bytes:,} bytes may take {needed / 1e9:.1f} GB of memory, but "
            f"{free_bytes / 1e9:.1f} GB are free: set tokenizer.sample_bytes to {fits} or less."
        )
    return free_bytes // needed


def lines_of(text: str) -> Iterator[str]:
    """Cut a text into lines the trainer accepts: at line feeds, then at a space before LINE_CHARACTERS, or where there
    is none, before a character that does not belong to the one before it; NUL, which it drops, goes."""
    for line in text.replace("\0", "").split("\n"):
        while len(line) > LINE_CHARACTERS:
            cut = line.rfind(" ", 1, LINE_CHARACTERS)
            if cut < 1:
                cut = LINE_CHARACTERS
                while cut > 1 and (_joins(line[cut]) or line[cut - 1] == "\u200d"):
                    cut -= 1
                cut = cut if cut > 1 else LINE_CHARACTERS
            yield line[:cut]
            line = line[cut:]
        if line:
            yield line


def _joins(character: str) -> bool:
    """Whether a character changes the one before it: a combining mark, a joiner or a variation selector."""
    return unicodedata.category(character) in ("Mn", "Mc", "Me", "Cf") or 0x1F3FB <= ord(character) <= 0x1F3FF


def _limits(sample_bytes: int, weights: Mapping[str, float] | None) -> Limits:
    """Bytes of each source, or without weights of all of them."""
    if weights is None:
        return {None: sample_bytes}
    total = sum(weights.values())
    if total <= 0:
        raise DataError("data.weights asks for nothing: give at least one source a weight above 0.")
    return {source: sample_bytes * weight / total for source, weight in weights.items() if weight}


def _check_sources(weights: Mapping[str, float], found: Mapping[str, int], folder: str) -> None:
    for source, weight in weights.items():
        if weight and source not in found:
            raise DataError(
                f"data.weights names the source {source}, but {folder} has only {', '.join(sorted(found))}."
            )


def _bytes(text: str) -> int:
    return len(text.encode())
