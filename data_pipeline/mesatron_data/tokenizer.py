"""Train and use a SentencePiece tokenizer whose decoded text equals the encoded text.

Our own tokenizers are BPE with byte fallback and no normalisation: every Unicode string can be encoded and comes back
unchanged, white space included. Ids: 0 unknown (never used, thanks to the bytes), 1 BOS, then 256 bytes, then the
learned pieces. There is no end-of-text id: BOS begins each document, so in generation a BOS says that the document is
over.

Any other SentencePiece model with a BOS id works too; text then round-trips as well as that model allows.
"""

import heapq
import io
import json
import random
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

import sentencepiece

from mesatron_data.errors import DataError
from mesatron_data.files import sha256, write_atomically, writing
from mesatron_data.records import LONE_SURROGATE, Counts, check_skipped, check_truncated, list_files, read_documents

MODEL_FILE = "tokenizer.model"
INFO_FILE = "tokenizer.json"
# SentencePiece writes a space as U+2581 and so decodes U+2581 as a space; it is encoded as its three bytes instead.
SPACE_MARK = "\u2581"
# The trainer drops longer lines (its limit is 4192 bytes); ours are cut at a space before that.
LINE_CHARACTERS = 1000


@dataclass(frozen=True)
class TokenizerInfo:
    """How a tokenizer was trained, as written to tokenizer.json.

    `sample_bytes` counts the UTF-8 bytes the trainer saw; `request` identifies what it was asked for.
    """

    sha256: str
    vocabulary_size: int
    bos_id: int
    seed: int
    sample_bytes: int
    sample_documents: int
    documents: int
    sentencepiece_version: str
    request: str


class Tokenizer:
    """A loaded SentencePiece model.

    Attributes: vocabulary_size (ids are 0 .. vocabulary_size - 1), bos_id, sha256 (of the model file), model (the
    file's bytes).
    """

    def __init__(self, model: bytes, path: Path) -> None:
        self._processor = sentencepiece.SentencePieceProcessor()
        try:
            self._processor.LoadFromSerializedProto(model)
        except RuntimeError as error:
            raise DataError(
                f"{path} is no SentencePiece model or is damaged: restore it, or train one with `mesatron tokenizer "
                "train` and --overwrite."
            ) from error
        self.model = model
        self.sha256 = sha256(model)
        self.vocabulary_size: int = self._processor.vocab_size()
        self.bos_id: int = self._processor.bos_id()
        if self.bos_id < 0:
            raise DataError(
                f"The tokenizer {path} has no BOS token, which separates documents: use a model trained with one."
            )
        space_mark = [self._processor.piece_to_id(f"<0x{byte:02X}>") for byte in SPACE_MARK.encode()]
        self._space_mark_ids = space_mark if all(map(self._processor.is_byte, space_mark)) else None

    @classmethod
    def load(cls, path: str | Path) -> "Tokenizer":
        """Load a model file, or the tokenizer.model in a folder. Raises DataError when it is missing or damaged."""
        path = Path(path)
        if path.is_dir():
            path = path / MODEL_FILE
        try:
            model = path.read_bytes()
        except OSError as error:
            raise DataError(
                f"Cannot read the tokenizer {path}: {error.strerror}; train one with `mesatron tokenizer "
                "train` or correct the path."
            ) from error
        tokenizer = cls(model, path)
        info = path.with_name(INFO_FILE)
        if (
            path.name == MODEL_FILE
            and info.exists()
            and json.loads(info.read_bytes()).get("sha256") != tokenizer.sha256
        ):
            raise DataError(
                f"{path} is not the tokenizer that {info} describes: restore it, or train one with `mesatron tokenizer "
                "train` and --overwrite."
            )
        return tokenizer

    def encode(self, text: str) -> list[int]:
        """Return the ids of any text, without BOS. Control symbols written in the text are encoded as plain characters.

        Raises DataError for half a surrogate pair, which is no character (a command line argument can hold one).
        """
        surrogate = LONE_SURROGATE.search(text)
        if surrogate:
            raise DataError(f"The text has half a surrogate pair at character {surrogate.start()}: remove it.")
        return self.encode_batch([text])[0]

    def encode_batch(self, texts: list[str]) -> list[list[int]]:
        """Return the ids of each text, without BOS; the texts hold no half surrogate pairs, as records never do."""
        encoded: list[list[int]] = self._processor.encode(texts, num_threads=1)
        if self._space_mark_ids is not None:
            for index, text in enumerate(texts):
                if SPACE_MARK in text:
                    encoded[index] = self._encode_space_marks(text, self._space_mark_ids)
        return encoded

    def decode(self, ids: list[int]) -> str:
        """Return the text of `ids`; BOS gives no text."""
        return self._processor.decode(ids)

    def piece(self, token: int) -> str:
        """Return how the token is written in the vocabulary (a space is U+2581, a byte is <0x0A>)."""
        return self._processor.id_to_piece(token)

    def _encode_space_marks(self, text: str, space_mark_ids: list[int]) -> list[int]:
        first, *others = self._processor.encode(text.split(SPACE_MARK), num_threads=1)
        for ids in others:
            first += space_mark_ids + ids
        return first


def tokenizer_request(input_folder: str, vocabulary_size: int, seed: int, max_sample_bytes: int) -> str:
    """Return what identifies a call of `train_tokenizer`: settings and names, sizes and times of its input files."""
    inputs = [(file.name, file.bytes, file.modified) for file in list_files(input_folder, "train")]
    return sha256(repr((inputs, vocabulary_size, seed, max_sample_bytes)).encode())


def train_tokenizer(
    input_folder: str,
    output_folder: str | Path,
    vocabulary_size: int,
    seed: int = 0,
    max_sample_bytes: int = 100_000_000,
    max_skipped_fraction: float = 0.01,
    allow_truncated_files: bool = False,
) -> TokenizerInfo:
    """Train on a random sample of `input_folder`/train and write tokenizer.model and tokenizer.json into
    `output_folder`.

    The sample is drawn by document, has at most `max_sample_bytes` of UTF-8 text (memory use is about ten times that)
    and, like the model, depends on the input, the seed and the SentencePiece version alone. Raises DataError for
    unusable input or a vocabulary that the text cannot fill, DiskFullError when there is no space.
    """
    output_folder = Path(output_folder)
    counts = Counts()
    sample = _sample(input_folder, counts, random.Random(seed), max_sample_bytes)
    check_truncated(counts.truncated, allow_truncated_files)
    check_skipped(counts.documents, counts.skipped, counts.places, max_skipped_fraction, f"{input_folder}/train")
    model = io.BytesIO()
    try:
        sentencepiece.SentencePieceTrainer.train(
            sentence_iterator=(line for text in sample for line in _lines(text)),
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
        sample_bytes=sum(len(text.encode()) for text in sample),
        sample_documents=len(sample),
        documents=counts.documents,
        sentencepiece_version=sentencepiece.__version__,
        request=tokenizer_request(input_folder, vocabulary_size, seed, max_sample_bytes),
    )
    with writing(output_folder):
        output_folder.mkdir(parents=True, exist_ok=True)
        # The description goes first: a model beside a description of another one is refused by Tokenizer.load.
        write_atomically(output_folder / INFO_FILE, json.dumps(asdict(info), indent=2).encode() + b"\n")
        write_atomically(output_folder / MODEL_FILE, tokenizer.model)
    return info


def _sample(input_folder: str, counts: Counts, draw: random.Random, max_bytes: int) -> list[str]:
    """Keep the documents with the smallest random keys that fit into `max_bytes`, in input order; one document always
    stays."""
    kept: list[tuple[float, int, str]] = []
    size = 0
    for file in list_files(input_folder, "train"):
        for document in read_documents(file, counts):
            heapq.heappush(kept, (-draw.random(), counts.documents, document.text))
            size += len(document.text.encode())
            while size > max_bytes and len(kept) > 1:
                size -= len(heapq.heappop(kept)[2].encode())
    return [text for _, _, text in sorted(kept, key=lambda item: item[1])]


def _lines(text: str) -> Iterator[str]:
    """Cut a text into lines the trainer accepts: at line feeds, then at a space before LINE_CHARACTERS; NUL, which it
    drops, goes."""
    for line in text.replace("\0", "").split("\n"):
        while len(line) > LINE_CHARACTERS:
            cut = line.rfind(" ", 1, LINE_CHARACTERS)
            cut = cut if cut > 0 else LINE_CHARACTERS
            yield line[:cut]
            line = line[cut:]
        if line:
            yield line
