"""The tiny data and the tiny finished run of tests/train."""

from tests.train.conftest import data, whole

__all__ = ["data", "whole"]
