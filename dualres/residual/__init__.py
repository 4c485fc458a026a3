"""Residual pathways: how a block of branches reads and writes the residual streams, one file per method family.

`pathway` is the interface. `standard`, `hyper_connections` (mHC), `attnres` and `dual` (DAR) implement it; `retrieval`
is the depth attention that AttnRes and DAR share, `route` which stream gives keys and values, `gates` the token-wise
gates, `live` the streams inside a block as sums of updates. `registry` has a row for every method by name.
"""
