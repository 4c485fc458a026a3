"""The Transformer around the residual pathways, and its loss.

`decoder` builds a decoder-only model from `attention`, `feedforward` or `moe` branches; `block` runs branches on a
residual pathway, and recomputes or compiles them; `loss` is the training objective; `generation` continues prompts;
`accounting` counts parameters, flops and bytes. Nothing here depends on a particular residual method.
"""
