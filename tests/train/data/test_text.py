"""Documents become tokens once, whoever reads, and sequences are a function of seed and place."""

import bz2
import gzip
import lzma
import pickle
import random
import re
import threading
import time
from pathlib import Path

import pytest
import torch

from train.data.text import open_text, sources, stream, tokenizers
from train.data.text.cache import build_once
from train.data.text.sources import find_source
from train.data.text.stream import RandomWindows, Windows
from train.data.text.tokenizers import BERT, GPT, Tokenizer, open_tokenizer


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch) -> Path:
    """A cache of its own for each test; returns where its files are."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache" / "leaner_kernels"


def documents_of(name: object, limit: int = 0) -> list[str]:
    return list(find_source(str(name), limit).documents())


def write(path: Path, text: str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, encoding="utf-8")
    return path


def tokens_of(part: stream.TokenStream) -> list[int]:
    return Windows(part, len(part)).__getitems__([(0, 0)])[0][0].tolist()


# Documents.


def test_the_bundled_text_is_english_and_has_no_paragraph_twice():
    documents = documents_of("pydoc")
    assert sum(map(len, documents)) > 250_000
    assert sum(" the " in text for text in documents) > len(documents) / 2
    paragraphs = [" ".join(p.split()) for text in documents for p in text.split("\n\n")]
    paragraphs = [p for p in paragraphs if p]
    assert len(paragraphs) == len(set(paragraphs))


def test_a_file_of_a_folder_is_a_document_unless_it_has_separators(tmp_path):
    write(tmp_path / "b" / "two.md", "\ufeffone\n\nstill one\n")
    write(
        tmp_path / "a.txt", "first<|endoftext|>\nsecond\nline\n<|endoftext|>\n\n<|endoftext|>third"
    )
    write(tmp_path / "ignored.py", "not text")
    write(tmp_path / ".hidden" / "c.txt", "nor this")
    documents = documents_of(tmp_path)
    assert sorted(documents) == ["first", "one\n\nstill one\n", "second\nline", "third"]
    assert documents_of(tmp_path, limit=2) == documents[:2]


def test_files_come_in_an_order_that_chance_fixed(tmp_path):
    for i in range(30):
        write(tmp_path / f"{i:02}.txt", f"{i:02}")
    documents = documents_of(tmp_path)
    assert sorted(documents) == [f"{i:02}" for i in range(30)] != documents
    assert documents_of(tmp_path) == documents


def test_lines_of_files_end_alike_whoever_wrote_them(tmp_path):
    text = "one line\nanother\n\nlast"
    for end in ("\n", "\r\n", "\r"):
        for encoding in ("utf-8", "utf-8-sig"):
            path = tmp_path / f"{len(end)}{ord(end[0])}{encoding}.txt"
            path.write_bytes(text.replace("\n", end).encode(encoding))
            assert documents_of(path) == text.split("\n\n")
    assert documents_of(tmp_path) == [text] * 6


def test_documents_keep_their_indentation_and_lose_blank_lines_alone(tmp_path):
    code = "\nclass A:\n    x = 1\n\n \n    def f(self):\n        y = 2  \n\n\treturn y\n\n"
    file = write(tmp_path / "a.py", code)
    documents = ["class A:\n    x = 1", "    def f(self):\n        y = 2  ", "\treturn y"]
    assert documents_of(file) == documents
    write(file, "  one\n\n  more\n<|endoftext|>\n\n    two\n<|endoftext|> three <|endoftext|>\n")
    assert documents_of(file) == ["  one\n\n  more", "    two", "three"]


def test_a_file_of_one_document_is_the_same_alone_and_in_a_folder(tmp_path):
    file = write(tmp_path / "a" / "a.txt", "one\nand the same\n")
    assert documents_of(file) == documents_of(tmp_path / "a") == ["one\nand the same\n"]


def test_a_file_with_brackets_and_stars_in_its_name_is_that_file(tmp_path):
    for name in ("text[1].txt", "te*t.txt", "te?t.txt"):
        write(tmp_path / name, f"{name}\n")
        for other in ("text1.txt", "test.txt"):
            write(tmp_path / other, "another file\n")
        assert documents_of(tmp_path / name) == [f"{name}\n"]


@pytest.fixture(scope="module")
def stories(tmp_path_factory):
    """The same stories in each form that Hugging Face's library reads."""
    datasets = pytest.importorskip("datasets", reason="reading hf: needs the package datasets")
    from pyarrow import Table, parquet

    root = tmp_path_factory.mktemp("stories")
    texts = [f"Story {i}: once upon a time." for i in range(7)] + [""]
    (root / "parquet" / "data").mkdir(parents=True)
    for split in ("train", "validation"):
        file = root / "parquet" / "data" / f"{split}-00000-of-00001.parquet"
        parquet.write_table(Table.from_pydict({"id": [*range(8)], "text": texts}), file)
    one = datasets.Dataset.from_dict({"text": texts})
    for kind in ("json", "csv"):
        (root / kind).mkdir()
        getattr(one, f"to_{kind}")(root / kind / f"train.{kind}")
    datasets.DatasetDict({"train": one, "test": one}).save_to_disk(root / "splits")
    datasets.DatasetDict({"test": one}).save_to_disk(root / "no train")
    for name, columns in {"no text": {"story": texts}, "numbers": {"text": [1, 2]}}.items():
        table = datasets.Dataset.from_dict(columns)
        datasets.DatasetDict({"train": table}).save_to_disk(root / name)
    (root / "empty").mkdir()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(datasets.config, "HF_DATASETS_CACHE", root / "hf")
        patch.setattr(datasets.config, "HF_HUB_OFFLINE", True)
        yield root


@pytest.mark.parametrize("form", ["parquet", "json", "csv", "splits"])
def test_hugging_face_data_gives_the_column_text_of_its_training_split(stories, form):
    documents = documents_of(f"hf:{stories / form}")
    assert documents == [f"Story {i}: once upon a time." for i in range(7)]
    assert documents_of(f"hf:{stories / form}", limit=2) == documents[:2]


@pytest.mark.parametrize(
    ("form", "message"),
    [
        ("no train", r"must have a split train, got test"),
        ("no text", r"must have a column text of strings, got story"),
        ("numbers", r"must have a column text of strings, got text"),
        ("empty", r"cannot be read: \S"),
        ("parquet:other", r"cannot be read: BuilderConfig 'other' not found"),
    ],
)
def test_hugging_face_data_of_another_form_is_one_line(stories, form, message):
    with pytest.raises(ValueError, match=message) as error:
        find_source(f"hf:{stories / form}")
    assert "\n" not in str(error.value)


BOOK = "Über den Fluß, sagte sie, führt kein Weg.\n\n" * 300
RUSSIAN = "Мороз и солнце; день чудесный!\n\n" * 300
ADVICE = {
    "Latin-1": (b"plain\n" * 9000 + BOOK.encode("latin-1"), "; iconv -f LATIN1 .* Latin-1$"),
    "Windows": (BOOK.replace(",", "…").encode("cp1252"), "; iconv -f WINDOWS-1252 .* Windows-1252"),
    "Cyrillic": (RUSSIAN.encode("cp1251"), "; iconv -f ENCODING .* of a known encoding$"),
    "Chinese": (("春眠不覚暁\n" * 300).encode("shift-jis"), "; iconv -f ENCODING"),
    "damaged": (RUSSIAN.encode() + b"\xd0\n" + RUSSIAN.encode(), "; iconv -c -f UTF-8 -t UTF-8 "),
    "cut": ("né".encode()[:-1], r"not UTF-8 \(unexpected end of data\); its last character is cut"),
    "UTF-16": (BOOK.encode("utf-16"), "is UTF-16: iconv -f UTF-16 -t UTF-8 converts it$"),
    "UTF-16, big end": (b"\xfe\xff" + BOOK.encode("utf-16-be"), "is UTF-16: iconv -f UTF-16 "),
    "UTF-32": (BOOK.encode("utf-32"), "is UTF-32: iconv -f UTF-32 -t UTF-8 converts it$"),
    "unmarked": (BOOK.encode("utf-16-le"), "UTF-16 without a byte order mark: iconv -f UTF-16LE"),
    "unmarked, big end": (BOOK.encode("utf-16-be"), "without a byte .* mark: iconv -f UTF-16BE"),
    "unmarked, Cyrillic": (RUSSIAN.encode("utf-16-le"), "without a byte|a binary file"),
    "unmarked, 32 bits": (BOOK.encode("utf-32-le"), "a binary file, because it has zero bytes"),
    "gzip": (gzip.compress(BOOK.encode()), "is compressed with gzip: decompress it first$"),
    "bzip2": (bz2.compress(BOOK.encode()), "is compressed with bzip2"),
    "xz": (lzma.compress(BOOK.encode()), "is compressed with xz"),
    "zstd": (b"\x28\xb5\x2f\xfd" + bytes(range(256)), "is compressed with zstd"),
    "PDF": (b"%PDF-1.4\n%\xe2\xe3\xcf\xd3\n" + bytes(range(256)) * 20, "is a PDF: extract"),
    "plain PDF": (b"%PDF-1.4\nplain", "is a PDF: extract its text first"),
    "zip": (b"PK\x03\x04" + bytes(range(256)), "is a zip archive, as .docx"),
    "tables": (b"PAR1" + bytes(range(256)), "is a Parquet table"),
    "machine code": (b"\x7fELF" + bytes(range(256)) * 9, "is a binary file, because it has zero"),
}


@pytest.mark.parametrize("kind", ADVICE)
def test_files_that_are_not_utf8_are_named_and_no_advice_turns_them_into_noise(tmp_path, kind):
    content, message = ADVICE[kind]
    file = tmp_path / "odd.txt"
    file.write_bytes(content)
    for name in (file, tmp_path):
        with pytest.raises(ValueError, match=r"--data holds .*odd\.txt, which is ") as error:
            documents_of(name)
        said = str(error.value)
        assert re.search(message, said), said
        assert "\n" not in said
        if kind not in ("Latin-1", "Windows"):
            assert "LATIN1" not in said


@pytest.mark.parametrize("form", ["{}.txt", "{}/1.txt", "{}/deep/1.md", "corpus.{}.txt"])
@pytest.mark.parametrize(("train", "held_out"), [("train", "valid"), ("Training", "Testing")])
def test_splits_of_text_are_not_trained_on_together(tmp_path, form, train, held_out):
    for name in (train, held_out, "test"):
        write(tmp_path / "set" / form.format(name), f"on {name}")
    write(tmp_path / "set" / "README.md", "about")
    if form == "corpus.{}.txt":
        train, held_out = f"corpus.{train}", f"corpus.{held_out}"
    with pytest.raises(ValueError, match=r"set has the splits .*: give --data (.*)$") as error:
        find_source(str(tmp_path / "set"))
    said, validation = str(error.value).split("give --data ")[1].split(" --validation ")
    assert documents_of(said) == [f"on {train.removeprefix('corpus.')}"]
    assert Path(validation).exists()
    write(tmp_path / "set" / "install.md", "on install")
    assert len(documents_of(tmp_path / "set")) == 5


def test_files_that_hold_no_text_are_named(tmp_path):
    with pytest.raises(ValueError, match=r"contains no \.txt, .* file: .* or hf:"):
        find_source(str(tmp_path))
    with pytest.raises(ValueError, match=r"t\.jsonl is a table: .* give hf:FOLDER"):
        find_source(str(write(tmp_path / "t.jsonl", "{}")))
    file = tmp_path / "odd.txt"
    for blank in ("", " \n\n "):
        write(file, blank)
        with pytest.raises(ValueError, match="contains no text: it is empty or blank"):
            open_text(str(tmp_path), "bytes", specials=GPT)


# Tokenisers.

ODD = "Hello, Wörld — Ünïcode 😀\n\tend  of\r\nline"


def in_bytes(specials: tuple[str, ...]) -> Tokenizer:
    return open_tokenizer("bytes", None, specials=specials)


def test_bytes_are_bytes_and_specials_follow_them():
    tokenizer = in_bytes(BERT)
    assert tokenizer.encode("é") == [0xC3, 0xA9]
    assert tokenizer.encode_batch([ODD, ""]) == [list(ODD.encode()), []]
    assert tokenizer.decode([*ODD.encode(), tokenizer.end]) == f"{ODD}[SEP]"
    assert tokenizer.encode(bytes(range(128)).decode()) == [*range(128)]
    assert tokenizer.decode([0xC3, 65, 300]) == "\ufffdA"
    every = "".join(map(chr, range(0x80, 0x800))) + "\U0010ffff"
    assert tokenizer.encode(every) == [*every.encode()]
    assert tokenizer.decode(tokenizer.encode(every)) == every
    assert tokenizer.bytes_per_token().tolist() == [1] * 256 + [0] * 5
    assert (tokenizer.vocab_size, tokenizer.specials["[MASK]"]) == (261, 260)
    assert in_bytes(GPT).end == 256


def small_source(text: str = "") -> sources.TextSource:
    texts = ["the cat sat on the mat. The Café of the théâtre: a b c", text]
    return sources.TextSource("small", ["small", text], lambda: iter(filter(None, texts)))


def test_byte_pairs_are_trained_and_lose_nothing():
    pytest.importorskip("tokenizers", reason="byte pairs need the package tokenizers")
    tokenizer = open_tokenizer("bpe", small_source(), specials=GPT, vocab_size=270)
    assert tokenizer.vocab_size == 270
    assert tokenizer.specials == {"<|endoftext|>": 0}
    ids = tokenizer.encode(ODD)
    assert tokenizer.decode(ids) == ODD
    assert tokenizer.encode_batch([ODD, "a"]) == [ids, tokenizer.encode("a")]
    assert len(tokenizer.encode("the the")) == 2
    lengths = tokenizer.bytes_per_token()
    assert lengths[ids].sum() == len(ODD.encode())
    assert lengths[tokenizer.end] == 0
    # Models have room for more tokens than little text gives.
    assert tokenizer.decode([*ids, 50_000]) == ODD


def test_word_pieces_are_lowercase_without_accents(tmp_path):
    pytest.importorskip("tokenizers", reason="word pieces need the package tokenizers")
    tokenizer = open_tokenizer("wordpiece", small_source(), specials=BERT, vocab_size=64)
    assert [tokenizer.specials[name] for name in BERT] == [0, 1, 2, 3, 4]
    assert tokenizer.end == 3
    assert tokenizer.encode("Thé CAFÉ") == tokenizer.encode("the cafe")
    assert tokenizer.decode(tokenizer.encode("Thé MAT!?")) == "the mat [UNK] [UNK]"
    assert tokenizer.bytes_per_token() is None
    assert len(tokenizer.encode("the")) == 1
    write(tmp_path / "tokenizer.json", tokenizer.files()["tokenizer.json"])
    listed = open_tokenizer(str(tmp_path), small_source(), specials=BERT)
    assert listed.digest == tokenizer.digest


@pytest.mark.parametrize(("name", "specials"), [("bpe", GPT), ("wordpiece", BERT)])
def test_the_same_text_trains_the_same_tokeniser(name, specials):
    train = {"bpe": tokenizers._train_byte_pairs, "wordpiece": tokenizers._train_word_pieces}[name]
    text = "".join(documents_of("pydoc", limit=6))
    one, other = (train(small_source(text), specials, 600).to_str() for _ in range(2))
    assert one == other


@pytest.mark.parametrize(("name", "letters"), [("bpe", "กขฃคฅฆงจฉช"), ("wordpiece", "ACGT")])
def test_text_without_spaces_trains_in_time_in_proportion(name, letters):
    train = {"bpe": tokenizers._train_byte_pairs, "wordpiece": tokenizers._train_word_pieces}[name]
    specials = GPT if name == "bpe" else BERT
    text = "".join(random.Random(0).choices(letters, k=320_000))

    def seconds(length: int) -> float:
        source = sources.TextSource("dna", [], lambda: iter([text[:length]]))
        begin = time.process_time()
        trained = train(source, specials, 512)
        assert ".{" not in trained.to_str(), "words are cut in training alone"
        return time.process_time() - begin

    seconds(1000)
    assert seconds(320_000) < 8 * seconds(80_000) + 0.5


def not_to_be_had(*_args: object, **_kwargs: object) -> None:
    raise FileNotFoundError("no network")


def test_gpt2_without_network_says_what_to_give(monkeypatch):
    pytest.importorskip("tokenizers", reason="byte pairs need the package tokenizers")
    hub = pytest.importorskip("huggingface_hub", reason="comes with tokenizers")
    monkeypatch.setattr(hub, "hf_hub_download", not_to_be_had)
    with pytest.raises(ValueError, match=r"its tokenizer.json, or --tokenizer bpe") as error:
        open_tokenizer("gpt2", small_source(), specials=GPT)
    assert "\n" not in str(error.value)


def test_tokenisers_that_do_not_fit_are_one_line(tmp_path):
    pytest.importorskip("tokenizers", reason="needs the package tokenizers")
    bad = write(tmp_path / "tokenizer.json", "{}")
    (tmp_path / "empty").mkdir()
    for name, message in {
        "words": r"--tokenizer must be bytes, .* got 'words'",
        bad: r"cannot be read: ",
        tmp_path / "empty": r"--tokenizer must be bytes, .* got .*empty",
    }.items():
        with pytest.raises(ValueError, match=message) as error:
            open_tokenizer(str(name), small_source(), specials=GPT)
        assert "\n" not in str(error.value)
    with pytest.raises(ValueError, match=r"--vocab-size must be at least 257 .* got 200"):
        open_tokenizer("bpe", small_source(), specials=GPT, vocab_size=200)
    with pytest.raises(ValueError, match=r"--vocab-size must be at least \d+ .* got 9"):
        open_tokenizer("wordpiece", small_source(), specials=BERT, vocab_size=9)
    with pytest.raises(ValueError, match=r"bytes must have one of <\|endoftext\|>"):
        in_bytes(("[PAD]",))


# What is kept.


def test_one_of_many_makes_a_file_and_the_others_wait_for_it(cache):
    made, found = [], []

    def make(path: Path) -> None:
        made.append(path)
        time.sleep(0.1)
        path.write_text("whole")

    def ask() -> None:
        found.append(build_once("thing", make).read_text())

    asking = [threading.Thread(target=ask) for _ in range(4)]
    for thread in asking:
        thread.start()
    for thread in asking:
        thread.join()
    assert found == ["whole"] * 4
    assert len(made) == 1
    assert made[0] != cache / "thing"


def test_text_is_encoded_once_and_again_when_it_changes(tmp_path, monkeypatch):
    file = write(tmp_path / "a.txt", "one\n\ntwo")
    first = open_text(str(file), "bytes", specials=GPT)
    with monkeypatch.context() as patch:
        patch.setattr(stream, "_batches", None)
        again = open_text(str(file), "bytes", specials=GPT)
    assert (again.train, again.held_out) == (first.train, first.held_out)
    write(file, "one\n\ntwo\n\nthree")
    assert open_text(str(file), "bytes", specials=GPT).documents == 3
    assert open_text(str(file), "bytes", specials=GPT, limit=1).documents == 1


def test_each_document_ends_and_the_last_tenth_is_held_out(tmp_path):
    text = open_text(str(write(tmp_path / "a.txt", "ab\n\ncdé")), "bytes", specials=GPT)
    assert tokens_of(text.train) + tokens_of(text.held_out) == [*b"ab", 256, *"cdé".encode(), 256]
    assert text.documents == 2
    assert (len(text.train), len(text.held_out)) == (7, 1)
    counts = text.train.counts(257)
    assert counts.sum() == 7
    assert counts[ord("a")] == counts[256] == 1


def test_other_text_is_held_out_and_else_a_tenth_of_no_more_than_is_asked_for(tmp_path):
    train = str(write(tmp_path / "a.txt", "abcdefghi" * 11))
    other = str(write(tmp_path / "b.txt", "xyz"))
    text = open_text(train, "bytes", specials=GPT, validation=other)
    assert (len(text.train), tokens_of(text.held_out)) == (100, [*b"xyz", 256])
    assert text.facts()["validation"] == f"--validation {other}"
    whole = open_text(train, "bytes", specials=GPT)
    assert (len(whole.train), len(whole.held_out)) == (90, 10)
    some = open_text(train, "bytes", specials=GPT, most_held_out=4)
    assert (len(some.train), len(some.held_out)) == (96, 4)
    assert some.facts()["validation"] == "the last 4 of 100 tokens"


def test_a_tokeniser_of_other_text_is_refused(tmp_path):
    english = write(tmp_path / "english.txt", "the cat sat on the mat " * 50)
    source = find_source(str(english))
    trained = open_tokenizer("wordpiece", source, specials=BERT, vocab_size=60)
    write(tmp_path / "t.json", trained.files()["tokenizer.json"])
    greek = write(tmp_path / "greek.txt", "η γάτα κάθισε στο χαλί " * 50)
    assert open_text(str(english), str(tmp_path / "t.json"), specials=BERT).documents == 1
    message = r"t\.json does not fit --data: 100% of its tokens are unknown"
    with pytest.raises(ValueError, match=message):
        open_text(str(greek), str(tmp_path / "t.json"), specials=BERT)


STORY = "One day Mia found a kite near the hill. She said: what a kite!"


@pytest.mark.parametrize("name", ["bytes", "bpe"])
def test_bytes_per_token_add_up_to_the_text_or_are_absent(tmp_path, name):
    pytest.importorskip("tokenizers")
    file = str(write(tmp_path / "a.txt", f"{STORY} Ünïcode 😀\n\n" * 99))
    text = open_text(file, name, specials=GPT, vocab_size=400)
    parts = (part.counts(len(text.bytes_per_token)) for part in (text.train, text.held_out))
    assert sum(part @ text.bytes_per_token for part in parts) == 99 * len(
        f"{STORY} Ünïcode 😀".encode()
    )
    # One that puts a space before each document counts bytes that are not there.
    tokenizer = in_bytes(GPT)
    kind = tokenizers.library.pre_tokenizers.ByteLevel(add_prefix_space=True)
    tokenizer.tokenizer.pre_tokenizer = kind
    write(tmp_path / "spaced.json", tokenizer.files()["tokenizer.json"])
    assert open_text(file, str(tmp_path / "spaced.json"), specials=GPT).bytes_per_token is None


def write_tokenizer(path: Path, model: str, normalizer=None) -> str:
    """Write a tokeniser that was trained on English alone, and return its path."""
    library = tokenizers.library
    names = {"BPE": "BpeTrainer", "WordLevel": "WordLevelTrainer", "Unigram": "UnigramTrainer"}
    kind, _, how = model.partition(" ")
    unknown = {"unk_token": "<unk>"} if kind == "WordLevel" or how == "unknown" else {}
    whole = library.Tokenizer(getattr(library.models, kind)(**unknown))
    more = {"special_tokens": ["</s>", "<unk>"]}
    if kind == "BPE" and not unknown:
        whole.pre_tokenizer = library.pre_tokenizers.ByteLevel(add_prefix_space=False)
        whole.decoder = library.decoders.ByteLevel()
        more |= {"initial_alphabet": whole.pre_tokenizer.alphabet()} if how == "whole" else {}
    else:
        whole.pre_tokenizer = library.pre_tokenizers.Whitespace()
        more |= {"unk_token": "<unk>"} if kind == "Unigram" else {}
    if normalizer is not None:
        whole.normalizer = normalizer(library.normalizers)
    trainer = getattr(library.trainers, names[kind])(vocab_size=400, show_progress=False, **more)
    whole.train_from_iterator([STORY] * 10, trainer)
    whole.save(str(path))
    return str(path)


LOSING = ["BPE", "BPE unknown", "WordLevel", "Unigram"]


@pytest.mark.parametrize("model", LOSING)
@pytest.mark.parametrize("odd", ["😀🚀🌍", "春眠不覚暁", "γάτα"])
def test_text_that_a_tokeniser_has_no_tokens_for_is_refused(tmp_path, model, odd):
    name = write_tokenizer(tmp_path / "t.json", model)
    message = r"does not fit {}: \d+(\.\d)?% of (it has no token|its tokens are unknown); "
    file = tmp_path / "a.txt"
    for text in (odd * 300, f"{STORY} {odd}\n\n" * 300):
        write(file, text)
        with pytest.raises(ValueError, match=message.format("--data")):
            open_text(str(file), name, specials=GPT)
    plain = str(write(tmp_path / "plain.txt", f"{STORY}\n\n" * 300))
    with pytest.raises(ValueError, match=message.format(r"--validation .*a\.txt")):
        open_text(plain, name, specials=GPT, validation=str(file))
    assert open_text(plain, name, specials=GPT).lost == 0


@pytest.mark.parametrize("model", LOSING)
def test_a_small_share_without_tokens_is_said_and_there_are_no_bytes_per_token(tmp_path, model):
    name = write_tokenizer(tmp_path / "t.json", model)
    file = write(tmp_path / "a.txt", f"{STORY}\n\n" * 99 + "é")
    text = open_text(str(file), name, specials=GPT)
    assert text.lost == 2 / (99 * len(STORY) + 2)
    assert text.facts()["lost_by_the_tokeniser"] == "0.03% of the text"
    assert text.bytes_per_token is None


def test_words_that_a_bert_does_not_know_are_said_up_to_a_half(tmp_path):
    source = find_source(str(write(tmp_path / "english.txt", f"{STORY}\n\n" * 9)))
    trained = open_tokenizer("wordpiece", source, specials=BERT, vocab_size=90)
    write(tmp_path / "t.json", trained.files()["tokenizer.json"])
    file = write(tmp_path / "a.txt", f"{STORY} γάτα\n\n" * 99)
    text = open_text(str(file), str(tmp_path / "t.json"), specials=BERT)
    size = len(f"{STORY} γάτα".encode())
    # Four letters of two bytes; the accent is not counted.
    assert text.lost == pytest.approx(8 / size)
    assert text.facts()["lost_by_the_tokeniser"] == f"{8 / size:.2%} of the text"


def test_a_normaliser_may_change_case_and_accents_and_nothing_more(tmp_path):
    file = str(write(tmp_path / "a.txt", f"{STORY.upper()} Ä\n\n" * 99))
    lower = lambda n: n.Sequence([n.NFD(), n.StripAccents(), n.Lowercase()])  # noqa: E731
    name = write_tokenizer(tmp_path / "lower.json", "BPE whole", lower)
    text = open_text(file, name, specials=GPT)
    assert (text.lost, text.bytes_per_token) == (0, None)
    gone = lambda n: n.Replace("KITE", "")  # noqa: E731
    name = write_tokenizer(tmp_path / "none.json", "BPE whole", gone)
    with pytest.raises(ValueError, match=r"12\.\d% of it has no token"):
        open_text(file, name, specials=GPT)


def test_dense_documents_are_left_out(tmp_path):
    file = str(write(tmp_path / "a.txt", "abcd\n\nééé"))
    assert open_text(file, "bytes", specials=BERT, max_density=1).documents == 1
    assert open_text(file, "bytes", specials=BERT, max_density=2).documents == 2
    with pytest.raises(
        ValueError, match=r"a\.txt: every document has more than --max-density 0\.5"
    ):
        open_text(file, "bytes", specials=BERT, max_density=0.5)


# Sequences.


def numbered(tmp_path: Path, length: int) -> stream.TokenStream:
    """Tokens 0, 1, 2, ... after ten that belong to something else."""
    path = tmp_path / "tokens.bin"
    torch.arange(-10, length, dtype=torch.int32).numpy().astype("uint16").tofile(path)
    return stream.TokenStream(path, "uint16", 10, 10 + length)


def starts(data, epoch: int = 0) -> list[int]:
    (tokens,) = data.__getitems__([(epoch, index) for index in range(len(data))])
    assert tokens.dtype == torch.int64
    assert tokens.shape == (len(data), data.length)
    assert (tokens.diff(dim=1) == 1).all()
    return tokens[:, 0].tolist()


def test_random_windows_start_anywhere(tmp_path):
    tokens = numbered(tmp_path, 12)
    data = RandomWindows(tokens, 9, count=50, seed=0)
    assert set(starts(data)) == {0, 1, 2, 3}
    assert starts(data) != starts(data, epoch=1)


@pytest.mark.parametrize("kind", ["all", "random"])
def test_a_window_depends_on_seed_and_key_alone(tmp_path, kind):
    tokens = numbered(tmp_path, 2000)

    def windows(seed: int) -> Windows | RandomWindows:
        if kind == "all":
            return Windows(tokens, 33, stride=32, seed=seed)
        return RandomWindows(tokens, 33, count=60, seed=seed)

    data, other = windows(1), windows(2)
    keys = [(2, 5), (0, 1), (2, 7)]
    (together,) = data.__getitems__(keys)
    in_a_worker = pickle.loads(pickle.dumps(data))
    assert len(pickle.dumps(data)) < 1000, "a worker must not get a copy of the text"
    for key, row in zip(keys, together):
        assert torch.equal(in_a_worker.__getitems__([key])[0][0], row)
    assert not torch.equal(other.__getitems__(keys)[0], together)


@pytest.mark.parametrize("how", [{}, {"seed": 0}])
def test_too_little_text_is_one_line(tmp_path, how):
    with pytest.raises(ValueError, match=r"--data .* at least \d+ tokens .* got 32"):
        Windows(numbered(tmp_path, 32), 33, **how)
    with pytest.raises(ValueError, match=r"--data .* at least 33 tokens .* got 32"):
        RandomWindows(numbered(tmp_path, 32), 33, count=1, seed=0)
