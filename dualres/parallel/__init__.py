"""Parallelism beside the model, never inside it: expert, tensor, sequence and pipeline."""
