"""Text to token ids and back, by a tokenizer of either kind: SentencePiece or byte-level BPE.

Our own tokenizers (`mesatron_data.tokenizer_training`) are SentencePiece BPE with byte fallback and no normalisation:
every Unicode string can be encoded and comes back unchanged, white space included. Ids: 0 unknown (never used, thanks
to the bytes), 1 BOS, then 256 bytes, then the learned pieces. There is no end-of-text id: BOS begins each document, so
in generation a BOS says that the document is over.

Any other SentencePiece model with a BOS id works too, and so does byte-level BPE as GPT-2's (`mesatron_data.byte_bpe`).
Where one of those changes text, `lossless` is false and preparation counts the documents that do not come back as they
were.
"""

import json
from pathlib import Path
from typing import Protocol

from mesatron_data.byte_bpe import GPT2_FILES, ByteBpe, from_gpt2_files
from mesatron_data.errors import DataError
from mesatron_data.files import cannot_read, sha256
from mesatron_data.manifest import load_manifest, read_file
from mesatron_data.records import LONE_SURROGATE
from mesatron_data.sentence_piece import SentencePiece

MODEL_FILE = "tokenizer.model"
BPE_FILE = "tokenizer.json"
INFO_FILE = "training.json"
OLD_INFO_FILE = "tokenizer.json"
# What normalisations change: white space, compatibility and composed characters, case, controls, unusual scripts.
PROBES = (
    " two  spaces \t\ttabs\r\nlines\n\n\rend ",
    "\0\x01\x7f\x85\xa0\xad\u200b\u200d\u200e\u200f\u2028\u2029\u202e\ufeff\ufffd\U000e0041",
    "ﬁ ① ² Å Å é e\u0301 ％ Ａ ｶﾞ ㎏ ǅ İ ß",
    "\u2581 <s> </s> <unk> <|endoftext|> [CLS]",
    "👩\u200d👩\u200d👧 \u200fשלום العربية हिन्दी 日本語 한국어 𝔘𝔫𝔦 𐀀 \U0010ffff",
)


class Codec(Protocol):
    """What the two kinds have in common. `file` is the name under which the model lies in a folder."""

    file: str
    vocabulary_size: int
    bos_id: int

    def encode_batch(self, texts: list[str]) -> list[list[int]]: ...

    def decode(self, ids: list[int]) -> str: ...

    def piece(self, token: int) -> str: ...


class Tokenizer:
    """A loaded tokenizer.

    Attributes: vocabulary_size (ids are 0 .. vocabulary_size - 1), bos_id, model (the file's bytes), sha256 (of them),
    file (the name to give it), lossless (whether decoding gives back any text that was encoded; found by trying).
    """

    def __init__(self, model: bytes, path: str | Path) -> None:
        self._codec: Codec = ByteBpe(model, path) if model.lstrip()[:1] == b"{" else SentencePiece(model, path)
        self.model = model
        self.sha256 = sha256(model)
        self.file = self._codec.file
        self.vocabulary_size, self.bos_id = self._codec.vocabulary_size, self._codec.bos_id
        self.lossless = all(
            self.decode(ids) == text for ids, text in zip(self.encode_batch(list(PROBES)), PROBES, strict=True)
        )

    @classmethod
    def load(cls, path: str | Path) -> "Tokenizer":
        """Load a tokenizer from one of its files or the folder it lies in: tokenizer.model (SentencePiece),
        tokenizer.json (of Hugging Face's library), or vocab.json and merges.txt (GPT-2's form, also under OpenAI's
        names encoder.json and vocab.bpe).

        Raises DataError when there is none or it is damaged.
        """
        path = Path(path)
        if path.is_dir():
            path = _find(path)
        pair = next((names for names in GPT2_FILES if path.name in names), None)
        try:
            model = from_gpt2_files(*(path.with_name(name) for name in pair)) if pair else path.read_bytes()
        except OSError as error:
            advice = "train one with `mesatron tokenizer train` or correct the path"
            raise cannot_read(f"the tokenizer {error.filename or path}", error, advice) from error
        tokenizer = cls(model, path)
        if path.name == MODEL_FILE and trained_as(path.parent).get("sha256", tokenizer.sha256) != tokenizer.sha256:
            raise DataError(
                f"{path} is not the tokenizer that {INFO_FILE} beside it describes: restore it, or train one with "
                "`mesatron tokenizer train` and --overwrite."
            )
        return tokenizer

    @classmethod
    def of_prepared(cls, folder: str) -> "Tokenizer":
        """Load the tokenizer that a prepared folder (local path or URL) was made with."""
        name = load_manifest(folder).tokenizer_file
        return cls(read_file(folder, name), f"{folder}/{name}")

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
        return self._codec.encode_batch(texts)

    def decode(self, ids: list[int]) -> str:
        """Return the text of `ids`; BOS gives no text."""
        return self._codec.decode(ids)

    def piece(self, token: int) -> str:
        """Return how the token is written in the vocabulary (in SentencePiece a space is U+2581, a byte is <0x0A>; in
        byte-level BPE every byte is a printable character, a space Ġ)."""
        return self._codec.piece(token)


def trained_as(folder: Path) -> dict[str, object]:
    """Return what `mesatron tokenizer train` noted in a folder about the model it wrote there; {} where it did not."""
    for name in (INFO_FILE, OLD_INFO_FILE):
        try:
            info = json.loads((folder / name).read_bytes())
        except (OSError, ValueError):
            continue
        if isinstance(info, dict) and "sha256" in info:
            return info
    return {}


def _find(folder: Path) -> Path:
    """The file in a folder to load a tokenizer from; tokenizer.model where there is none."""
    model = folder / MODEL_FILE
    names = [BPE_FILE, *(vocabulary for vocabulary, _ in GPT2_FILES)]
    if model.exists():
        return model
    return next((folder / name for name in names if (folder / name).exists()), model)
