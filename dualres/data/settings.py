"""Settings of `dualres prepare`; importing them is fast, for the command line."""

from dataclasses import dataclass

from dualres.util.errors import DataError

PYTHON = "python"  # the default source: Python's standard library


@dataclass(frozen=True)
class Settings:
    """All that determines the result: `prepare` resumes only with the same settings."""

    source: str
    tokenizer: str  # bytes, bpe:SIZE, tekken, or the path of a tokenizer.json
    field: str = "text"
    subset: str | None = None
    split: str = "train"
    end_of_text: str | None = None
    held_out: float = 0.05  # fraction of the documents for validation, by a hash of their text
    shard_tokens: int = 100_000_000

    def __post_init__(self) -> None:
        if not 0 <= self.held_out < 1:
            raise DataError(f"--held-out {self.held_out} is not a fraction: use 0 ≤ --held-out < 1")
        if self.shard_tokens < 1:
            raise DataError(f"--shard-tokens {self.shard_tokens} is not positive: use, for example, 100000000")
