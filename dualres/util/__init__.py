"""Helpers without dependencies within dualres: atomic files, progress, tables, templates, optional packages, errors."""
