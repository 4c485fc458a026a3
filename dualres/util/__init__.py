"""Helpers without dependencies within dualres: atomic files, progress, text tables, optional dependencies, errors."""
