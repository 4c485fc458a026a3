"""dualres: the residual pathway of a Transformer as a replaceable part."""

from importlib.metadata import PackageNotFoundError, version

try:
    __version__ = version("dualres")
except PackageNotFoundError:  # a checkout that is not installed
    __version__ = "0+unknown"
