"""Helpers that import nothing else from dualres: files, progress, tables, templates, curves, errors, extras, AMX."""
