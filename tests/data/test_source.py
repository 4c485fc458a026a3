"""Every format gives the same documents, and what cannot be read is named."""

import gzip
import json
import sys
from pathlib import Path

import pyarrow
import pyarrow.parquet
import pytest

from dualres.data import source
from dualres.data.source import DOCUMENT_CHARACTERS, MAX_CHARACTERS, open_source
from dualres.util.errors import DataError
from tests.data.corpus import (
    ALL_ODD,
    DOCUMENTS,
    SUFFIXES,
    command,
    document,
    gzipped,
    run,
    write,
    write_jsonl,
    zstandard,
)


def documents(name: Path | str, field: str = "text") -> list[str]:
    return [text for part in open_source(str(name), field) for text in part.documents()]


@pytest.mark.parametrize("suffix", SUFFIXES)
def test_every_format_gives_the_same_documents(tmp_path: Path, suffix: str):
    assert documents(write(tmp_path / f"corpus{suffix}", DOCUMENTS)) == DOCUMENTS


def test_a_folder_is_read_in_the_order_of_names(tmp_path: Path):
    (tmp_path / "b").mkdir()
    names = ["a.jsonl.gz", "b/1.parquet", "b/10.txt", "b/2.jsonl", "c.txt.zst"]
    for number, name in reversed(list(enumerate(names))):
        write(tmp_path / name, [document(number)])
    (tmp_path / "README.md").write_text("no document")
    parts = open_source(str(tmp_path))
    assert [(part.name, part.size) for part in parts] == [(n, (tmp_path / n).stat().st_size) for n in names]
    assert documents(tmp_path) == [document(number) for number in range(len(names))]


def test_text_is_cut_at_blank_lines(tmp_path: Path):
    paragraphs = [f"{number} " * (number % 700) + ("\n \r\n" if number % 3 else "\n") for number in range(400)]
    path = write(tmp_path / "a.txt", paragraphs)
    found = documents(path)
    assert "".join(found) == "".join(paragraphs)
    assert len(found) > 10
    for text in found[:-1]:
        lines = text.splitlines(keepends=True)
        assert lines[-1].strip() == ""
        assert len(text) >= DOCUMENT_CHARACTERS
        assert all(line.strip() for line in "".join(lines[:-1])[DOCUMENT_CHARACTERS:].splitlines()[1:])


@pytest.mark.parametrize("text", ["é日👩" * 100_000, "no blank line\n" * 30_000], ids=["one line", "no blank lines"])
def test_text_without_blank_lines_is_cut_too(tmp_path: Path, text: str):
    found = documents(write(tmp_path / "a.txt", [text]))
    assert "".join(found) == text
    assert max(map(len, found)) < 2 * MAX_CHARACTERS


def test_another_field(tmp_path: Path):
    (tmp_path / "a.jsonl").write_text('{"body": "x", "text": "y"}\n')
    pyarrow.parquet.write_table(pyarrow.table({"text": ["y"], "body": ["x"]}), tmp_path / "a.parquet")
    assert documents(tmp_path, "body") == ["x", "x"]


def test_large_strings(tmp_path: Path):
    """The type that `pandas` and `datasets` write."""
    table = pyarrow.table({"text": pyarrow.array(DOCUMENTS, pyarrow.large_string())})
    pyarrow.parquet.write_table(table, tmp_path / "a.parquet")
    assert documents(tmp_path) == DOCUMENTS


def json_lines(*lines: str) -> bytes:
    return "\n".join(lines).encode()


GOOD = '{"text": "fine"}'
MANY = json_lines(*(json.dumps({"text": text}) for text in DOCUMENTS))
BAD = {  # name, content, what the error says beside the name
    "bad json": ("a.jsonl", json_lines(GOOD, '{"text": "x"'), "line 2 is not JSON"),
    "deep json": ("a.jsonl", json_lines(GOOD, "[" * 100_000), "line 2 is not JSON"),
    "long number": ("a.jsonl", json_lines(GOOD, '{"text": "x", "n": ' + "9" * 5000 + "}"), "line 2 is not JSON"),
    "no field": (
        "a.jsonl",
        json_lines(GOOD, "", '{"body": "x", "id": 1}'),
        "line 3 has None instead of text",
    ),
    "number": ("a.jsonl", json_lines('{"text": 3}'), "line 1 has 3 instead of text under 'text'"),
    "null": ("a.jsonl", json_lines(GOOD, '{"text": null}'), "line 2 has None instead of text under 'text'"),
    "list": ("a.json", b'[{"text": "x"}]', "line 1 has None instead of text under 'text' (it has list)"),
    "lone surrogate": ("a.jsonl", json_lines(GOOD, r'{"text": "a\ud800b"}'), "line 2 is not valid Unicode"),
    "not utf-8": ("a.txt", ("é\n" * 9).encode() + b"\xff\n", "line 10 cannot be read"),
    "latin-1": ("a.jsonl", json_lines(GOOD) + '\n{"text": "café"}\n{}'.encode("latin-1"), "line 2 cannot be read"),
    "cut utf-8": ("a.txt", b"fine\n" + "é".encode()[:1], "line 2 cannot be read"),
    "cut gz": ("a.jsonl.gz", gzip.compress(MANY)[:-300], "cannot be read"),
    "cut gz end": ("a.jsonl.gz", gzip.compress(MANY)[:-1], "line 7 cannot be read"),
    "altered gz": ("a.jsonl.gz", gzip.compress(MANY)[:90] + b"\xff" * 9, "line 1 cannot be read"),
    "wrong gz checksum": ("a.jsonl.gz", gzip.compress(MANY)[:-8] + b"\0" * 8, "line 7 cannot be read"),
    "no gz": ("a.jsonl.gz", GOOD.encode(), "line 1 cannot be read"),
    "cut zst": ("a.jsonl.zst", zstandard(MANY)[:-300], "cannot be read"),
    "cut zst end": ("a.jsonl.zst", zstandard(MANY)[:-1], "cannot be read"),
    "no zst": ("a.txt.zst", GOOD.encode(), "line 1 cannot be read"),
    "no parquet": ("a.parquet", b"PAR1", "cannot be read as Parquet"),
}


@pytest.mark.parametrize(("name", "content", "says"), BAD.values(), ids=BAD)
def test_bad_files_are_named(tmp_path: Path, name: str, content: bytes, says: str):
    (tmp_path / name).write_bytes(content)
    with pytest.raises(DataError) as raised:
        documents(tmp_path / name)
    assert str(tmp_path / name) in str(raised.value)
    assert says in str(raised.value)


def test_documents_before_a_bad_line_are_read(tmp_path: Path):
    path = tmp_path / "a.jsonl.gz"
    path.write_bytes(gzipped(MANY) + b"garbage")
    read = open_source(str(path))[0].documents()
    assert [next(read) for _ in range(6)] == DOCUMENTS[:6]
    with pytest.raises(DataError, match=r"a\.jsonl\.gz, line 7 cannot be read"):
        list(read)


NOT_TEXT = {
    "cut": (DOCUMENTS, lambda data: data[: len(data) // 2], "cannot be read as Parquet"),
    "altered": (DOCUMENTS, lambda data: data[:100] + b"\xff" * 3000 + data[3100:], "cannot be read as Parquet"),
    "no column": (None, None, "has no column 'text': use --field with one of ['body']"),
    "null": (["a", None], None, "row 2 has None instead of text under 'text'"),
    "numbers": ([7], None, "row 1 has 7 instead of text under 'text'"),
    "not utf-8": (pyarrow.array([b"a", b"\xff"]).view(pyarrow.string()), None, "cannot be read as Parquet"),
}


@pytest.mark.parametrize(("column", "spoil", "says"), NOT_TEXT.values(), ids=NOT_TEXT)
def test_bad_parquet_is_named(tmp_path: Path, column, spoil, says: str):
    path = tmp_path / "a.parquet"
    pyarrow.parquet.write_table(pyarrow.table({"body": ["x"]} if column is None else {"text": column}), path)
    if spoil is not None:
        path.write_bytes(spoil(path.read_bytes()))
    with pytest.raises(DataError) as raised:
        documents(path)
    assert str(path) in str(raised.value)
    assert says in str(raised.value)


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("a.docx", "a.docx has an unknown format"),
        ("a.docx.gz", "a.docx.gz has an unknown format"),
        ("nothing", "has no file that ends with .txt"),
    ],
)
def test_unknown_files(tmp_path: Path, name: str, says: str):
    (tmp_path / "a.docx").touch()
    (tmp_path / "a.docx.gz").touch()
    (tmp_path / "nothing").mkdir()
    with pytest.raises(DataError, match=says):
        open_source(str(tmp_path / name))


@pytest.mark.parametrize("name", ["missing", "missing/corpus.txt", "/missing/corpus", "./missing", "a/b/c"])
def test_no_source(name: str):
    with pytest.raises(DataError, match="unknown source"):
        open_source(name)


def test_the_default_source_needs_nothing():
    found = documents("python")
    assert found == documents("python")
    assert sum(map(len, found)) > 10_000_000
    for topic, there in {
        'The "if" statement': True,
        "class JSONDecoder(object)": True,
        "import test.support": False,
    }.items():
        assert any(topic in text for text in found) == there


def test_the_default_source_names_its_version():
    """A preparation that another interpreter began is not gone on with."""
    version = ".".join(map(str, sys.version_info[:3]))
    assert all(part.name.endswith(f"of Python {version}") for part in open_source("python"))


@pytest.mark.parametrize("suffix", [".jsonl", ".parquet"])
def test_hugging_face_dataset(tmp_path: Path, suffix: str):
    write(tmp_path / f"train{suffix}", DOCUMENTS)
    write(tmp_path / f"test{suffix}", [ALL_ODD])
    assert list(source._dataset(str(tmp_path), None, "train", "text")) == DOCUMENTS
    assert list(source._dataset(str(tmp_path), None, "test", "text")) == [ALL_ODD]
    with pytest.raises(DataError, match=rf"^{tmp_path}, row 1 has None instead of text under 'body' \(it has .*text"):
        list(source._dataset(str(tmp_path), None, "train", "body"))
    with pytest.raises(DataError, match=f"{tmp_path} is not a file or folder, and cannot be read as a dataset: .*dev"):
        list(source._dataset(str(tmp_path), None, "dev", "text"))


def test_a_dataset_that_breaks_off_is_named(tmp_path: Path):
    write_jsonl(tmp_path / "train.jsonl", DOCUMENTS)
    with (tmp_path / "train.jsonl").open("a") as file:
        file.write('\n{"text": ')
    with pytest.raises(DataError, match=f"{tmp_path} is not a file or folder, and cannot be read as a dataset"):
        list(source._dataset(str(tmp_path), None, "train", "text"))


def test_a_dataset_out_of_reach(tmp_path: Path):
    arguments = ["prepare", "nobody/nothing", str(tmp_path / "out")]
    assert run(command, arguments, tmp_path / "said", {"HF_HUB_OFFLINE": "1"}) == 2
    last = (tmp_path / "said").read_text().splitlines()[-1]
    assert last.startswith("dualres: nobody/nothing is not a file or folder, and cannot be read as a dataset: ")
