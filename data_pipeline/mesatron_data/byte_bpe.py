"""Byte-level BPE as GPT-2 introduced it, as `mesatron_data.tokenizer.Tokenizer` uses it.

Hugging Face's `tokenizers` reads the files and decodes. It encodes too, except where a tokenizer is of GPT-2's plain
form: then `tiktoken` does, which gives the same ids in a fifth of the time.

The token that separates documents (GPT-2's <|endoftext|>) serves as BOS. Where a text holds such a special token as
characters, it is encoded as these characters.
"""

import json
import re
from pathlib import Path
from typing import Any

import tiktoken
import tokenizers

from mesatron_data.errors import DataError

BOS_TOKENS = ("<|endoftext|>", "<|begin_of_text|>", "<bos>", "<s>")
# How GPT-2 cuts text into words, written so that no run of characters is gone through twice.
GPT2_PATTERN = r"'(?:[sdmt]|ll|ve|re)| ?\p{L}++| ?\p{N}++| ?[^\s\p{L}\p{N}]++|\s++$|\s+(?!\S)|\s"
# A million white characters in a row are too many for tiktoken's search.
LONG_RUN = 100_000
WHITE_RUN = re.compile(rf"\s{{{LONG_RUN}}}")
GPT2_FILES = (("vocab.json", "merges.txt"), ("encoder.json", "vocab.bpe"))


class ByteBpe:
    """A tokenizer.json of Hugging Face's library with a token of BOS_TOKENS."""

    file = "tokenizer.json"

    def __init__(self, model: bytes, path: str | Path) -> None:
        try:
            description: dict[str, Any] = json.loads(model)
            vocabulary = tokenizers.Tokenizer.from_str(model.decode()).get_vocab(with_added_tokens=True)
            added = description.get("added_tokens") or []
            special = {token["id"] for token in added if token["special"]}
            # Special tokens in a text are its characters, and nothing is put around a text or cut off it.
            plain: dict[str, Any] = {"truncation": None, "padding": None, "post_processor": None}
            plain["added_tokens"] = [token for token in added if not token["special"]]
            self._tokenizer = tokenizers.Tokenizer.from_str(json.dumps(description | plain))
        except Exception as error:  # the library raises no narrower one
            raise DataError(
                f"{path} is no tokenizer of Hugging Face's form or is damaged ({str(error).rstrip('.')}): restore it."
            ) from error
        bos = next((token for token in BOS_TOKENS if token in vocabulary), None)
        if bos is None:
            raise DataError(
                f"The tokenizer {path} has none of {', '.join(BOS_TOKENS)} to separate documents: use one that has."
            )
        self._pieces = {token: piece for piece, token in vocabulary.items()}
        self.vocabulary_size = max(self._pieces) + 1
        self.bos_id: int = vocabulary[bos]
        self._silent = special | {self.bos_id}
        self._fast = _fast_encoder(description | plain)

    def encode_batch(self, texts: list[str]) -> list[list[int]]:
        """Return the ids of each text, without BOS."""
        return [self._encode(text) for text in texts]

    def decode(self, ids: list[int]) -> str:
        """Return the text of `ids`; special tokens give no text."""
        return str(self._tokenizer.decode([token for token in ids if token not in self._silent]))

    def piece(self, token: int) -> str:
        """Return how the token is written in the vocabulary; "" for an id without a token."""
        return self._pieces.get(token, "")

    def _encode(self, text: str) -> list[int]:
        if self._fast is not None and not (len(text) > LONG_RUN and WHITE_RUN.search(text)):
            return self._fast.encode_ordinary(text)
        ids: list[int] = self._tokenizer.encode(text, add_special_tokens=False).ids
        return ids


def _fast_encoder(description: dict[str, Any]) -> tiktoken.Encoding | None:
    """The same encoder by tiktoken, which takes a token's id for its priority; None where it would not be the same."""
    model, words = description["model"], description["pre_tokenizer"] or {}
    plain = {
        "type": "BPE", "dropout": None, "continuing_subword_prefix": None, "end_of_word_suffix": None,
        "byte_fallback": False,
    }  # fmt: skip
    if (
        description["normalizer"] is not None
        or description["added_tokens"]
        or any(model.get(key) not in (value, None, "") for key, value in plain.items())
        or (words.get("type"), words.get("add_prefix_space"), words.get("use_regex", True))
        != ("ByteLevel", False, True)
    ):
        return None
    ids: dict[str, int] = model["vocab"]
    merges = [pair if isinstance(pair, list) else pair.split(" ") for pair in model["merges"]]
    merged = [ids["".join(pair)] for pair in merges]
    signs = _byte_signs()
    if merged != sorted(set(merged)) or not all(sign in ids for sign in signs):
        return None
    if merged and max(ids[sign] for sign in signs) > merged[0]:
        return None
    made = {*signs, *("".join(pair) for pair in merges)}
    ranks = {bytes(signs[sign] for sign in token): ids[token] for token in made}
    return tiktoken.Encoding("plain", pat_str=GPT2_PATTERN, mergeable_ranks=ranks, special_tokens={})


def _byte_signs() -> dict[str, int]:
    """The printable character that stands for each byte in GPT-2's vocabulary: itself where it is one, else one from
    U+0100 on."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(0x100) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(0x100 + n): byte for n, byte in enumerate(others)}


def from_gpt2_files(vocabulary: Path, merges: Path) -> bytes:
    """Return the tokenizer.json of a vocabulary (token to id, JSON) and merges (two tokens a line, best first).

    The same files give the same bytes. Raises DataError for files that are not of that form.
    """
    text = merges.read_text(encoding="utf-8")
    try:
        ids: dict[str, int] = json.loads(vocabulary.read_bytes())
        pairs = [line.split(" ") for line in text.split("\n") if line and not line.startswith("#version")]
        if not all(len(pair) == 2 and "".join(pair) in ids for pair in pairs):
            raise ValueError(f"{merges.name} has a line that is no pair of tokens of {vocabulary.name}")
    except (ValueError, TypeError) as error:
        raise DataError(f"{vocabulary} and {merges.name} are no byte-level BPE ({error}): restore them.") from error
    special = [
        {
            "id": ids[token], "content": token, "single_word": False, "lstrip": False, "rstrip": False,
            "normalized": False, "special": True,
        }
        for token in BOS_TOKENS if token in ids
    ]  # fmt: skip
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}
    description = {
        "version": "1.0", "truncation": None, "padding": None, "added_tokens": special, "normalizer": None,
        "pre_tokenizer": byte_level, "post_processor": None, "decoder": byte_level,
        "model": {
            "type": "BPE", "dropout": None, "unk_token": None, "continuing_subword_prefix": None,
            "end_of_word_suffix": None, "fuse_unk": False, "byte_fallback": False, "vocab": ids, "merges": pairs,
        },
    }  # fmt: skip
    return json.dumps(description, ensure_ascii=False).encode()
