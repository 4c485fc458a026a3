"""The resources that a run needs, without a GPU: `dualres plan`, `dualres train --dry-run`, `dualres describe`.

`memory` and `communication` give one rank's bytes by part, `estimate` both and the seconds of a step for one mesh, and
`search` the fastest mesh that fits. `plan` prints them. They rest on `activations`, which runs a rank's share of the
real model (`local_model`) on fake tensors, on `stages` (the weights and blocks of a pipeline rank, and the order in
which it runs micro-batches) and on `hardware` (speed of a GPU and its links). `describe` and `parameter_tables` count
one model. All of it is an analytical estimate, not validated on GPUs; the tests compare memory and communication with
real CPU processes.
"""
