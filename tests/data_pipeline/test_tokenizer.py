"""The tokenizer: decoded text against the text encoded, equal training input against equal model bytes, damaged files
against errors."""

import io
import json
from pathlib import Path

import numpy as np
import pytest
import sentencepiece
from mesatron_data.errors import DataError
from mesatron_data.tokenizer import Tokenizer, train_tokenizer

ODD_TEXTS = [
    "",
    " ",
    "  two  spaces at both ends  ",
    "\ttab\t\ttabs\n\n\nlines\r\nwindows\r",
    "nul \0 and \0\0",
    "\u2581 the space mark \u2581\u2581x\u2581",
    "\ufeffmark \ufffd replacement \u2028 separator",
    "👩\u200d👩\u200d👧 \u200fשלום e\u0301 é",
    "<s> </s> <unk> <0x0A> control symbols as text",
    "def f(x):\n        return x  # 日本語",
]


@pytest.fixture(scope="module")
def tokenizer(tokenizer_path: Path) -> Tokenizer:
    return Tokenizer.load(tokenizer_path)


def test_odd_texts_round_trip(tokenizer: Tokenizer) -> None:
    encoded = tokenizer.encode_batch(ODD_TEXTS)
    assert [tokenizer.decode(ids) for ids in encoded] == ODD_TEXTS
    assert encoded == [tokenizer.encode(text) for text in ODD_TEXTS]
    ids = [token for ids in encoded for token in ids]
    assert tokenizer.bos_id not in ids
    assert 0 <= min(ids) <= max(ids) < tokenizer.vocabulary_size


def test_every_character_round_trips(tokenizer: Tokenizer) -> None:
    characters = [chr(code) for code in range(0x110000) if not 0xD800 <= code < 0xE000]
    texts = ["".join(characters[begin : begin + 4096]) for begin in range(0, len(characters), 4096)]
    assert [tokenizer.decode(ids) for ids in tokenizer.encode_batch(texts)] == texts


def test_random_strings_round_trip(tokenizer: Tokenizer) -> None:
    draw = np.random.default_rng(0)
    alphabet = [*"  \t\n\0\u2581abcthe.<>/s", "\u00e9", "日", "😀"]
    texts = ["".join(draw.choice(alphabet, size=draw.integers(0, 80))) for _ in range(3000)]
    assert [tokenizer.decode(ids) for ids in tokenizer.encode_batch(texts)] == texts


def test_a_long_line_round_trips(tokenizer: Tokenizer) -> None:
    text = ("the quick brown fox " * 60_000)[:1_000_000]
    assert tokenizer.decode(tokenizer.encode(text)) == text


def test_half_a_surrogate_pair_is_refused(tokenizer: Tokenizer) -> None:
    with pytest.raises(DataError, match="half a surrogate pair at character 3"):
        tokenizer.encode("abc\ud800")


def test_bos_gives_no_text(tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode("the end")
    assert tokenizer.decode([tokenizer.bos_id, *ids, tokenizer.bos_id]) == "the end"


def test_training_is_a_function_of_input_and_seed(records: Path, tokenizer: Tokenizer, tmp_path: Path) -> None:
    info = train_tokenizer(str(records), tmp_path / "all", 320)
    assert info.sha256 == tokenizer.sha256
    assert json.loads((tmp_path / "all/tokenizer.json").read_text())["sha256"] == info.sha256
    assert info.vocabulary_size == tokenizer.vocabulary_size == 320
    sampled = [
        train_tokenizer(str(records), tmp_path / str(n), 290, seed=seed, max_sample_bytes=9000)
        for n, seed in enumerate([5, 5, 6])
    ]
    assert sampled[0] == sampled[1]
    assert sampled[0].sha256 != sampled[2].sha256
    for info in sampled:
        assert 0 < info.sample_bytes <= 9000
        assert info.documents == 323 > info.sample_documents


def test_more_pieces_than_the_text_can_fill(records: Path, tmp_path: Path) -> None:
    with pytest.raises(
        DataError, match=r"Cannot train a tokenizer of 30000 pieces on .*train: Vocabulary size too high"
    ):
        train_tokenizer(str(records), tmp_path, 30_000)
    with pytest.raises(DataError, match="Cannot train a tokenizer of 100 pieces"):
        train_tokenizer(str(records), tmp_path, 100)
    assert list(tmp_path.iterdir()) == []


def test_missing_damaged_and_swapped_files(tokenizer_path: Path, tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"Cannot read the tokenizer .*nowhere"):
        Tokenizer.load(tmp_path / "nowhere")
    (tmp_path / "other.model").write_bytes(tokenizer_path.read_bytes()[:1000])
    with pytest.raises(DataError, match=r"other\.model is no SentencePiece model .* tokenizer train` and --overwrite"):
        Tokenizer.load(tmp_path / "other.model")
    (tmp_path / "tokenizer.model").write_bytes(tokenizer_path.read_bytes())
    (tmp_path / "tokenizer.json").write_text('{"sha256": "0"}')
    with pytest.raises(DataError, match="is not the tokenizer that"):
        Tokenizer.load(tmp_path)


def test_a_model_from_elsewhere(tmp_path: Path) -> None:
    model = io.BytesIO()
    lines = ["the quick brown fox jumps over the lazy dog"] * 50
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(lines), model_writer=model, vocab_size=40, hard_vocab_limit=False, minloglevel=2
    )
    path = tmp_path / "foreign.model"
    path.write_bytes(model.getvalue())
    tokenizer = Tokenizer.load(path)
    assert tokenizer.decode(tokenizer.encode("the lazy fox")) == "the lazy fox"
    assert tokenizer.bos_id == 1


def test_a_model_without_bos_is_refused(tmp_path: Path) -> None:
    model = io.BytesIO()
    lines = ["the quick brown fox jumps over the lazy dog"] * 50
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(lines),
        model_writer=model,
        vocab_size=40,
        bos_id=-1,
        hard_vocab_limit=False,
        minloglevel=2,
    )
    (tmp_path / "foreign.model").write_bytes(model.getvalue())
    with pytest.raises(DataError, match="has no BOS"):
        Tokenizer.load(tmp_path / "foreign.model")
