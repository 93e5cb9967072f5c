"""SentencePiece models, as `mesatron_data.tokenizer.Tokenizer` uses them."""

from pathlib import Path

import sentencepiece

from mesatron_data.errors import DataError

# SentencePiece writes a space as U+2581 and so decodes U+2581 as a space; it is encoded as its three bytes instead.
SPACE_MARK = "\u2581"


class SentencePiece:
    """A SentencePiece model with a BOS id."""

    file = "tokenizer.model"

    def __init__(self, model: bytes, path: str | Path) -> None:
        self._processor = sentencepiece.SentencePieceProcessor()
        try:
            self._processor.LoadFromSerializedProto(model)
        except RuntimeError as error:
            raise DataError(
                f"{path} is no SentencePiece model or is damaged: restore it, or train one with `mesatron tokenizer "
                "train` and --overwrite."
            ) from error
        self.vocabulary_size: int = self._processor.vocab_size()
        self.bos_id: int = self._processor.bos_id()
        if self.bos_id < 0:
            raise DataError(
                f"The tokenizer {path} has no BOS token, which separates documents: use a model trained with one."
            )
        space_mark = [self._processor.piece_to_id(f"<0x{byte:02X}>") for byte in SPACE_MARK.encode()]
        self._space_mark_ids = space_mark if all(map(self._processor.is_byte, space_mark)) else None

    def encode_batch(self, texts: list[str]) -> list[list[int]]:
        """Return the ids of each text, without BOS."""
        encoded: list[list[int]] = self._processor.encode(texts, num_threads=1)
        if self._space_mark_ids is not None:
            for index, text in enumerate(texts):
                if SPACE_MARK in text:
                    encoded[index] = self._encode_space_marks(text, self._space_mark_ids)
        return encoded

    def decode(self, ids: list[int]) -> str:
        """Return the text of `ids`."""
        return self._processor.decode(ids)

    def piece(self, token: int) -> str:
        """Return how the token is written in the vocabulary."""
        return self._processor.id_to_piece(token)

    def _encode_space_marks(self, text: str, space_mark_ids: list[int]) -> list[int]:
        first, *others = self._processor.encode(text.split(SPACE_MARK), num_threads=1)
        for ids in others:
            first += space_mark_ids + ids
        return first
