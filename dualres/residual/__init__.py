"""Residual pathways: how a block of branches reads and writes the residual streams, one file per method family.

`pathway` is the interface. `standard`, `hyper_connections` (mHC), `attnres` and `dar` implement it; `retrieval` is the
depth attention that AttnRes and DAR share, `route` assigns key and value streams, `gate` is a token-wise gate,
`live` the streams inside a block as sums of updates. `registry` maps every method's name to its row.
"""
