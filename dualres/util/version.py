"""The version of the installed package."""

from importlib.metadata import PackageNotFoundError, version

try:
    VERSION = version("dualres")
except PackageNotFoundError:  # running from a checkout
    VERSION = "0+unknown"
