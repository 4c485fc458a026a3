"""Parallelism, kept outside the model code.

`mesh` sizes the dimensions data, expert, tensor and pipeline and rejects a mesh that the model cannot be sharded over;
`tensor` shards branches and vocabulary (with sequence parallelism) and has the vocabulary's cross-entropy; `experts`
distributes the experts of MoE layers; `pipeline` runs chunks of blocks and caches the history on every rank.
`train.engines.fsdp` completes and clips the gradients over the whole mesh.
"""
