from pathlib import Path

import pytest

from tests.train.tiny import tiny_config, tiny_data, train_tiny


@pytest.fixture(scope="session")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_data(tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="session")
def whole(data: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An uninterrupted run."""
    folder = tmp_path_factory.mktemp("runs") / "whole"
    assert train_tiny(tiny_config(), data, folder).finished
    return folder
