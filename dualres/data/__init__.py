"""Text to batches of tokens.

`source` reads documents from files, folders and Hugging Face datasets; `tokenizer` has bytes, BPE and Tekken;
`prepare` writes token shards and resumes after an interruption; `shards` is their format and verification;
`loader` serves sequences in an order that depends only on the seed.
"""
