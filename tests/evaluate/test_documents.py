"""Where documents are found, what they are called, and what is refused."""

import json
import re
from collections.abc import Sequence
from pathlib import Path

import pytest

from dualres.evaluate import documents
from dualres.evaluate.documents import PALOMA, DocumentSource, find_sources, texts
from dualres.util.errors import DataError
from tests.data.corpus import ODD, write

TEXTS = ["one", "", *ODD.values()]


def fill(path: Path, rows: Sequence[str] = TEXTS) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    return write(path, rows)


def by_name(path: Path) -> dict[str, list[str]]:
    return {source.name: list(texts(source)) for source in find_sources(path)}


@pytest.mark.parametrize("suffix", [".jsonl", ".jsonl.gz", ".jsonl.zst"])
def test_one_file_per_source(tmp_path: Path, suffix: str):
    fill(tmp_path / f"c4_en{suffix}")
    fill(tmp_path / f"dolma-v1_5{suffix}", ["two"])
    fill(tmp_path / "README.txt")
    fill(tmp_path / f".cache/part{suffix}")
    assert by_name(tmp_path) == {"c4_en": TEXTS, "dolma-v1_5": ["two"]}


def test_one_folder_per_source(tmp_path: Path):
    fill(tmp_path / "ptb/val/b.jsonl.gz", ["b"])
    fill(tmp_path / "ptb/val/a.jsonl", ["a", ""])
    fill(tmp_path / "ptb/val/._a.jsonl", ["not a document"])
    fill(tmp_path / "ptb/val/deep/c.jsonl.zst", ["c"])
    fill(tmp_path / "mc4/x.jsonl", ["x"])
    fill(tmp_path / "gab.jsonl", ["g"])
    assert by_name(tmp_path) == {"gab": ["g"], "mc4": ["x"], "ptb": ["a", "", "b", "c"]}
    fill(tmp_path / "ptb/test/d.jsonl", ["d"])
    with pytest.raises(DataError, match=r"ptb has the splits test and val: keep the one"):
        find_sources(tmp_path)


def test_one_file_whose_rows_name_their_source(tmp_path: Path):
    path = tmp_path / "all.v1.jsonl"
    rows = [
        {"text": "a1", "source": "a"},
        {"text": "b1", "source": "b"},
        {"text": "none"},
        {"text": "", "source": "a"},
        {"text": "a2", "source": "a", "id": 3},
    ]
    path.write_text("\n".join(map(json.dumps, rows)))
    assert by_name(path) == {"a": ["a1", "", "a2"], "b": ["b1"], "all.v1": ["none"]}


def test_in_a_folder_the_file_names_the_source(tmp_path: Path):
    (tmp_path / "wikitext_103.jsonl").write_text('{"text": "a", "source": "wikitext-103"}\n{"text": "b", "source": 3}')
    assert by_name(tmp_path) == {"wikitext_103": ["a", "b"]}


def test_one_file_without_sources(tmp_path: Path):
    assert by_name(fill(tmp_path / "mine.jsonl.gz")) == {"mine": TEXTS}


def test_what_a_source_holds(tmp_path: Path):
    [source] = find_sources(fill(tmp_path / "a.jsonl"))
    assert source.documents == len(TEXTS)
    assert source.bytes == sum(len(text.encode()) for text in TEXTS)
    [same] = find_sources(fill(tmp_path / "b.jsonl.gz"))
    assert same.content == source.content
    [other] = find_sources(fill(tmp_path / "c.jsonl", ["on", "e", *TEXTS[2:]]))
    assert other.bytes == source.bytes
    assert other.content != source.content  # the edges between documents count


def test_a_source_that_changes_is_refused(tmp_path: Path):
    [source] = find_sources(fill(tmp_path / "a.jsonl", ["one", "two"]))
    fill(tmp_path / "a.jsonl", ["one", "too"])
    with pytest.raises(DataError, match="source a changed while it was being read"):
        list(texts(source))


def test_documents_are_read_one_by_one(tmp_path: Path):
    """An error in line 3 appears only after the texts before it."""
    path = tmp_path / "a.jsonl"
    path.write_text('{"text": "1"}\n{"text": "2"}\nbroken\n')
    read = texts(DocumentSource("a", (path,), False, 0, 0, ""))
    assert [next(read), next(read)] == ["1", "2"]
    with pytest.raises(DataError, match="line 3"):
        next(read)


GOOD = b'{"text": "fine"}\n\n'  # two lines
BAD = {
    "broken JSON": (b'{"text": "x"', "is not JSON"),
    "a word": (b"text", "is not JSON"),
    "a number beyond Python": (b'{"text": ' + b"1" * 5000 + b"}", "is not JSON"),
    "brackets beyond Python": (b"[" * 200_000, "is not JSON"),
    "a list": (b'["text"]', "is not an object but ['text']"),
    "a string": (b'"text"', "is not an object but 'text'"),
    "null": (b"null", "is not an object but None"),
    "no text": (b'{"txt": "x", "id": 1}', "has None as `text`, not a string (it has txt, id)"),
    "nothing": (b"{}", "has None as `text`, not a string (it has nothing)"),
    "a null text": (b'{"text": null}', "has None as `text`, not a string"),
    "a list of texts": (b'{"text": ["x"]}', "has ['x'] as `text`, not a string"),
    "a number": (b'{"text": 3}', "has 3 as `text`, not a string"),
    "half a pair": (b'{"text": "a\\ud800"}', "has a `text` that is not valid Unicode"),
    "no UTF-8": (b'{"text": "\xff"}', "cannot be read"),
    "an encoded surrogate": (b'{"text": "\xed\xa0\x80"}', "cannot be read"),
    "a cut character": (b'{"text": "\xe2\x82"}', "cannot be read"),
}


@pytest.mark.parametrize("layout", ["file", "folder", "folders"])
@pytest.mark.parametrize("name", BAD)
def test_malformed_rows_are_refused_by_file_and_line(tmp_path: Path, name: str, layout: str):
    row, says = BAD[name]
    path = tmp_path / "ptb/val/a.jsonl" if layout == "folders" else tmp_path / "a.jsonl"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(GOOD + row)
    with pytest.raises(DataError, match=re.escape(f"{path}, line 3 {says}")):
        find_sources(path if layout == "file" else tmp_path)


@pytest.mark.parametrize("name", ["3", "null", '""', '["a"]', '"\\udc00"'])
def test_a_source_that_is_no_name(tmp_path: Path, name: str):
    path = tmp_path / "a.jsonl"
    path.write_bytes(GOOD + f'{{"text": "x", "source": {name}}}'.encode())
    with pytest.raises(DataError, match=re.escape(f"{path}, line 3 has ") + ".*`source`"):
        find_sources(path)


@pytest.mark.parametrize("suffix", [".gz", ".zst"])
def test_a_file_that_was_cut_off(tmp_path: Path, suffix: str):
    path = fill(tmp_path / f"a.jsonl{suffix}", [f"text {number}" for number in range(3000)])
    path.write_bytes(path.read_bytes()[:-100])
    with pytest.raises(DataError, match=re.escape(f"{path}, line ") + r"\d+ cannot be read"):
        find_sources(tmp_path)


def test_a_file_that_is_not_what_its_name_says(tmp_path: Path):
    path = fill(tmp_path / "a.jsonl")
    path.rename(tmp_path / "a.jsonl.gz")
    with pytest.raises(DataError, match=r"a.jsonl.gz, line 1 cannot be read"):
        find_sources(tmp_path)


def none(folder: Path) -> str:
    (folder / "gab.jsonl").write_text("\n\n")
    return "the source gab has no text"


def all_empty(folder: Path) -> str:
    fill(folder / "gab/a.jsonl", ["", ""])
    return "the source gab has no text"


def empty_folder_of_a_source(folder: Path) -> str:
    (folder / "mc4/val").mkdir(parents=True)
    return f"{folder / 'mc4'} has no file that ends with .jsonl, .jsonl.gz, .jsonl.zst"


def twice(folder: Path) -> str:
    fill(folder / "c4_en.jsonl.gz")
    return f"{folder / 'c4_en.jsonl.gz'} and {folder / 'c4_en.jsonl'} are both the source c4_en: keep one"


@pytest.mark.parametrize("spoil", [none, all_empty, empty_folder_of_a_source, twice])
def test_folders_that_are_refused(tmp_path: Path, spoil):
    """Though another source is fine."""
    fill(tmp_path / "c4_en.jsonl")
    says = spoil(tmp_path)
    with pytest.raises(DataError, match=re.escape(says)):
        find_sources(tmp_path)


def test_paths_that_are_refused(tmp_path: Path):
    with pytest.raises(DataError, match="has no documents: add a file per source"):
        find_sources(tmp_path)
    with pytest.raises(DataError, match=re.escape(f"no documents at {tmp_path / 'gone'}")):
        find_sources(tmp_path / "gone")
    (tmp_path / "a.jsonl").write_text("")
    with pytest.raises(DataError, match="the source a has no text"):
        find_sources(tmp_path / "a.jsonl")
    (tmp_path / "a.csv").write_text("text")
    with pytest.raises(DataError, match=r"a\.csv has an unknown suffix: use \.jsonl"):
        find_sources(tmp_path / "a.csv")


def test_a_row_of_a_file_without_text(tmp_path: Path):
    (tmp_path / "a.jsonl").write_text('{"text": "x", "source": "full"}\n{"text": "", "source": "empty"}')
    with pytest.raises(DataError, match="the source empty has no text"):
        find_sources(tmp_path / "a.jsonl")


def test_a_source_per_row_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(documents, "MAX_SOURCES", 3)
    path = tmp_path / "a.jsonl"
    path.write_text("".join(f'{{"text": "x", "source": "https://{number}"}}\n' for number in range(4)))
    with pytest.raises(DataError, match="line 4 has source number 4, 'https://3'"):
        find_sources(path)


def test_the_papers_groups():
    assert len(PALOMA) == len(set(PALOMA.values())) == 16
    assert PALOMA["4chan_meta_sep"] == "4chan"
    assert PALOMA["twitterAAE_HELM_fixed"] == "Twitter AAE"
