"""DeepSpeed's ZeRO with the interface, optimizer and checkpoints of the other engines."""
# B batch  T tokens

import os
from typing import Any

import torch
from torch import Tensor, nn

from dualres.config.schema import Config
from dualres.model.attention import RouterReport
from dualres.model.loss import Objective
from dualres.train.engines.base import Engine, MicroBatch
from dualres.train.optimizer import adamw, fresh_state
from dualres.train.process_group import World
from dualres.util.optional_dependencies import need

MOMENTS = ("exp_avg", "exp_avg_sq")


class DeepSpeedEngine(Engine):
    """ZeRO stage 1, 2 or 3. Checkpoints hold full tensors, gathered one by one: any number of ranks can load them."""

    def __init__(self, config: Config, world: World, objective: Objective):
        train, stage = config.train, config.train.parallel.zero_stage
        if world.device.type == "cpu":
            os.environ.setdefault("DS_ACCELERATOR", "cpu")
        deepspeed = need("deepspeed", "deepspeed", "train.engine=deepspeed")
        self.access = need("deepspeed.utils", "deepspeed", "train.engine=deepspeed")
        settings = {
            "train_micro_batch_size_per_gpu": train.micro_batch,
            "gradient_accumulation_steps": -(-train.global_batch // (train.micro_batch * world.size)),
            "gradient_clipping": train.clip,
            "zero_optimization": {"stage": stage},
            "zero_allow_untested_optimizer": True,
            "bf16": {"enabled": train.precision == "bf16"},
            "steps_per_print": 10**9,
        }
        self.adamw = adamw(objective.decoder, train)
        wrapped, *_ = deepspeed.initialize(
            model=objective, optimizer=self.adamw, config=settings, dist_init_required=False
        )
        super().__init__(world, objective, wrapped)
        self.deepspeed: Any = wrapped
        self.parameters = dict(self.decoder.named_parameters())
        self._create_moments(config.model.context)

    def forward_backward(self, sequences: Tensor, weight: float, report: RouterReport, last: bool) -> Tensor:
        self.deepspeed.set_gradient_accumulation_boundary(last)
        loss = self.wrapped(sequences, report)
        self.deepspeed.backward(loss * weight, scale_wrt_gas=False)
        if not last:
            self.deepspeed.step()  # only counts the micro-batch
        return loss

    def update(self, learning_rate: float, clip: float) -> float:
        """DeepSpeed clips by its own setting and reports the norm only after the step."""
        for group in self.adamw.param_groups:
            group["lr"] = learning_rate
        self.deepspeed.step()
        return float(self.deepspeed.get_global_grad_norm())

    def tensors(self) -> dict[str, Tensor]:
        """Full copies, gathered from all ranks."""
        tensors = {}
        for name, parameter in self.parameters.items():
            tensors[f"model.{name}"] = self.access.safe_get_full_fp32_param(parameter)
            for key in MOMENTS:
                tensors[f"optimizer.{key}.{name}"] = self.access.safe_get_full_optimizer_state(parameter, key)
            tensors[f"optimizer.step.{name}"] = next(iter(self.adamw.state.values()))["step"].clone()
        return tensors

    def load_tensors(self, tensors: dict[str, Tensor]) -> None:
        """Each rank loads its part of the full tensors."""
        for name, parameter in self.parameters.items():
            weights = tensors[f"model.{name}"]
            moments = {key: tensors[f"optimizer.{key}.{name}"] for key in MOMENTS}
            if hasattr(parameter, "ds_tensor"):  # ZeRO 3; DeepSpeed's setter of full tensors cannot shard all of them
                self.access.safe_set_local_fp32_param(parameter, self._part(parameter, weights))
                for key, moment in moments.items():
                    self.access.safe_set_local_optimizer_state(parameter, self._part(parameter, moment), key)
                parameter.ds_tensor.data.copy_(self._part(parameter, weights))
            else:
                self.access.safe_set_full_fp32_param(parameter, weights)
                for key, moment in moments.items():
                    self.access.safe_set_full_optimizer_state(parameter, moment, key)
            if parameter.numel():  # unsharded, as are parameters too small for ZeRO 3: the forward pass reads this
                parameter.data.copy_(weights)
        for state in self.adamw.state.values():
            state["step"].copy_(next(value for name, value in tensors.items() if name.startswith("optimizer.step.")))

    def _part(self, parameter: Any, whole: Tensor) -> Tensor:
        """This rank's part of a tensor, padded with zeros."""
        size = parameter.ds_tensor.numel()
        padded = nn.functional.pad(whole.flatten(), (0, size * self.world.size - whole.numel()))
        return padded[self.world.rank * size : (self.world.rank + 1) * size]

    def _create_moments(self, context: int) -> None:
        """DeepSpeed creates AdamW's state in a step: take one with zero rate and gradient, and reset the step count."""
        for group in self.adamw.param_groups:  # DeepSpeed links the state of all groups after the first step
            for flat in group["params"]:
                self.adamw.state[flat] = fresh_state(flat)
        zeros = torch.zeros(1, context + 1, dtype=torch.long)
        self.accumulate([MicroBatch(zeros, 0.0)])
        self.update(0.0, 1.0)
        for state in self.adamw.state.values():
            state["step"].zero_()
