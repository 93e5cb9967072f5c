"""Tokenizers of both kinds: decoded text against the text encoded, one BPE in three forms of file against the library
it was trained with, damaged files against errors."""

import io
import json
import shutil
from pathlib import Path

import numpy as np
import pytest
import sentencepiece
import tokenizers
from mesatron_data.errors import DataError
from mesatron_data.inspect import inspect
from mesatron_data.shards import prepare
from mesatron_data.tokenizer import Tokenizer, trained_as
from mesatron_data.verify import verify

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
def trained_bpe(texts: dict[str, list[str]]) -> tokenizers.Tokenizer:
    """A byte-level BPE of 400 tokens, as GPT-2's was trained."""
    bpe = tokenizers.Tokenizer(tokenizers.models.BPE())
    bpe.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = tokenizers.decoders.ByteLevel()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=400, special_tokens=["<|endoftext|>"], show_progress=False,
        initial_alphabet=tokenizers.pre_tokenizers.ByteLevel.alphabet(),
    )  # fmt: skip
    bpe.train_from_iterator(texts["train"], trainer)
    return bpe


@pytest.fixture(scope="module")
def bpe_folder(trained_bpe: tokenizers.Tokenizer, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("bpe")
    for names in (("vocab.json", "merges.txt"), ("encoder.json", "vocab.bpe")):
        (folder / names[0]).parent.mkdir(exist_ok=True)
        for made, name in zip(trained_bpe.model.save(str(folder)), names, strict=True):
            place = folder / names[0].partition(".")[0] / name
            place.parent.mkdir(exist_ok=True)
            Path(made).rename(place)
    trained_bpe.save(str(folder / "tokenizer.json"))
    return folder


@pytest.fixture(scope="module", params=["sentence_piece", "byte_bpe"])
def tokenizer(request: pytest.FixtureRequest, tokenizer_path: Path, bpe_folder: Path) -> Tokenizer:
    return Tokenizer.load(tokenizer_path if request.param == "sentence_piece" else bpe_folder / "vocab")


def test_three_forms_of_one_bpe(trained_bpe: tokenizers.Tokenizer, bpe_folder: Path) -> None:
    """The ids of the library that trained it; both pairs of files give the same bytes, and so the same hash."""
    texts = [text for text in ODD_TEXTS if "<" not in text]
    expected = [encoding.ids for encoding in trained_bpe.encode_batch(texts)]
    places = ("vocab", "encoder", "tokenizer.json", "vocab/vocab.json", "vocab/merges.txt", "encoder/vocab.bpe", ".")
    loaded = [Tokenizer.load(bpe_folder / place) for place in places]
    for one in loaded:
        assert one.encode_batch(texts) == expected
        assert (one.vocabulary_size, one.bos_id, one.lossless) == (trained_bpe.get_vocab_size(), 0, True)
        assert one.piece(0) == "<|endoftext|>"
    assert len({one.sha256 for one in loaded}) == 2
    assert loaded[0].sha256 == loaded[1].sha256


def test_the_fast_encoder_gives_the_ids_of_the_library(
    trained_bpe: tokenizers.Tokenizer, bpe_folder: Path, texts: dict[str, list[str]]
) -> None:
    """On the text it was trained on, on random strings, and on long runs of one character; a tokenizer of another form
    is left to the library."""
    one = Tokenizer.load(bpe_folder)
    assert one._codec._fast is not None
    draw = np.random.default_rng(0)
    alphabet = [*"  \t\n\r\0abcthe.,'s0123", "'ll", " the", "é", "日", "😀", "\u2028", "\u200d", "\u0301"]
    odd = ["".join(draw.choice(alphabet, size=draw.integers(0, 60))) for _ in range(5000)]
    long = [character * 40_000 + end for character in " \nx.1😀" for end in ("", "x")]
    long += ["a" + " " * 1_200_000 + "b"]
    for some in (texts["train"], odd, long):
        assert one.encode_batch(some) == [trained_bpe.encode(text, add_special_tokens=False).ids for text in some]
    description = json.loads((bpe_folder / "tokenizer.json").read_text())
    spaced = description | {"pre_tokenizer": description["pre_tokenizer"] | {"add_prefix_space": True}}
    swapped = json.loads((bpe_folder / "tokenizer.json").read_text())
    ids = swapped["model"]["vocab"]
    first, second = ("".join(pair) for pair in swapped["model"]["merges"][:2])
    ids[first], ids[second] = ids[second], ids[first]
    for other in (description | {"normalizer": {"type": "NFC"}}, spaced, swapped):
        model = json.dumps(other).encode()
        library = tokenizers.Tokenizer.from_str(model.decode())
        one = Tokenizer(model, "made up")
        assert one._codec._fast is None
        assert one.encode_batch(odd) == [library.encode(text, add_special_tokens=False).ids for text in odd]


def test_special_tokens_in_a_text_are_characters(trained_bpe: tokenizers.Tokenizer, bpe_folder: Path) -> None:
    one = Tokenizer.load(bpe_folder)
    text = "end<|endoftext|>begin"
    assert 0 in trained_bpe.encode(text).ids
    assert 0 not in one.encode(text)
    assert one.decode([one.bos_id, *one.encode(text), one.bos_id]) == text


def test_unusable_bpe_files(bpe_folder: Path, tmp_path: Path) -> None:
    pair = shutil.copytree(bpe_folder / "vocab", tmp_path / "pair")
    (pair / "merges.txt").unlink()
    with pytest.raises(DataError, match=r"Cannot read the tokenizer .*merges.txt: No such file"):
        Tokenizer.load(pair)
    (pair / "merges.txt").write_text("a b c\n")
    with pytest.raises(DataError, match=r"are no byte-level BPE \(merges.txt has a line that is no pair of tokens"):
        Tokenizer.load(pair)
    (pair / "vocab.json").write_text("{")
    with pytest.raises(DataError, match="are no byte-level BPE"):
        Tokenizer.load(pair)
    whole = (bpe_folder / "tokenizer.json").read_text()
    (tmp_path / "tokenizer.json").write_text(whole[:1000])
    with pytest.raises(DataError, match=r"tokenizer.json is no tokenizer of Hugging Face's form"):
        Tokenizer.load(tmp_path)
    (tmp_path / "tokenizer.json").write_text(whole.replace("<|endoftext|>", "<|other|>"))
    with pytest.raises(DataError, match=r"has none of <\|endoftext\|>, .* to separate documents"):
        Tokenizer.load(tmp_path)


def test_documents_that_a_tokenizer_changes_are_counted(bpe_folder: Path, tmp_path: Path, records: Path) -> None:
    """Through preparation, with a tokenizer that composes characters (NFC) beside one that changes nothing."""
    description = json.loads((bpe_folder / "tokenizer.json").read_text())
    (tmp_path / "nfc").mkdir()
    (tmp_path / "nfc/tokenizer.json").write_text(json.dumps(description | {"normalizer": {"type": "NFC"}}))
    shutil.copytree(records, tmp_path / "in")
    texts = ["e\u0301", "é", "plain", "a\u030a and " * 20]
    (tmp_path / "in/train/z.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    for name, changed in (("nfc", {"text_changed_by_tokenizer": 2}), ("tokenizer.json", {})):
        path = tmp_path / name if name == "nfc" else bpe_folder
        manifest = prepare(str(tmp_path / "in"), tmp_path / f"out-{name}", path, 16).manifest
        assert manifest.splits["train"].normalised == changed
        assert manifest.tokenizer_file == "tokenizer.json"
        assert verify(tmp_path / f"out-{name}").manifest == manifest
        used = Tokenizer.of_prepared(str(tmp_path / f"out-{name}"))
        assert used.sha256 == manifest.tokenizer_sha256
        shown = inspect(tmp_path / f"out-{name}", samples=20).samples
        assert any("the " in piece.text for sample in shown for piece in sample)


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
    (tmp_path / "tokenizer.json").write_text(
        json.dumps({"sha256": Tokenizer.load(tokenizer_path).sha256, "request": 1})
    )
    assert trained_as(tmp_path)["request"] == 1, "what earlier versions noted is still read"
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
