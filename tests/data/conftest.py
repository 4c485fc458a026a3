import json
from pathlib import Path

import pytest

from dualres.data.prepare import prepare
from tests.data.corpus import document, settings, write


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Files of several formats; some end where a chunk ends, one is empty, some texts are empty."""
    folder = tmp_path_factory.mktemp("source")
    write(folder / "a.jsonl.gz", [document(0), "", document(1), document(2), ""])
    write(folder / "b.txt", [])
    write(folder / "c.parquet", [document(3), document(4)])
    write(folder / "d.txt.zst", [document(5), document(6)])
    return folder


@pytest.fixture(scope="session")
def whole(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What an uninterrupted preparation writes."""
    out = tmp_path_factory.mktemp("whole") / "out"
    index = prepare(settings(folder), out)
    assert [len(index.train), len(index.validation)] == [2, 2]
    assert json.loads((out / "progress.json").read_text())["chunks"] == 3
    return out
