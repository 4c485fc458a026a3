"""Engines: `build.build_engine` picks `base.TorchEngine` (single process, DDP), `fsdp` or `deepspeed` from a config."""
