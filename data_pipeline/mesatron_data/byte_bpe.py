"""Byte-level BPE as GPT-2 introduced it, as `mesatron_data.tokenizer.Tokenizer` uses it; the work is done by Hugging
Face's `tokenizers`.

The token that separates documents (GPT-2's <|endoftext|>) serves as BOS. Where a text holds such a special token as
characters, it is encoded as these characters.
"""

import json
from pathlib import Path
from typing import Any

import tokenizers

from mesatron_data.errors import DataError

BOS_TOKENS = ("<|endoftext|>", "<|begin_of_text|>", "<bos>", "<s>")
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

    def encode_batch(self, texts: list[str]) -> list[list[int]]:
        """Return the ids of each text, without BOS."""
        return [self._tokenizer.encode(text, add_special_tokens=False).ids for text in texts]

    def decode(self, ids: list[int]) -> str:
        """Return the text of `ids`; special tokens give no text."""
        return str(self._tokenizer.decode([token for token in ids if token not in self._silent]))

    def piece(self, token: int) -> str:
        """Return how the token is written in the vocabulary; "" for an id without a token."""
        return self._pieces.get(token, "")


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
