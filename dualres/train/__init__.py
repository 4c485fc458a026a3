"""Training: one loop for every model, residual method and engine.

`loop.train` starts or resumes a run; `optimizer` has AdamW and the learning-rate schedule; `engines` hold the model in
one process, DDP, FSDP2 with a parallel mesh, or DeepSpeed; `checkpoint` saves atomically and verifies; `metrics` logs
losses and throughput; `run_folder` defines the files of a run; `process_group` joins the processes of torchrun, and
`failure_detection` reports which of them failed. `preflight` checks a run before it starts, and `launch` prints the
command that starts it.
"""
