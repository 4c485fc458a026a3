"""Helpers that depend on nothing else: atomic files, progress, text tables, optional dependencies, errors."""
