from pathlib import Path

import pytest

from tests.train.tiny import tiny_data


@pytest.fixture(scope="session")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_data(tmp_path_factory.mktemp("tiny"))
