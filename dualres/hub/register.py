"""Make `transformers` know dualres models, without importing it: that takes seconds, and few programs need it."""

import contextlib
import importlib
import importlib.util
import sys
from collections.abc import Callable, Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any


def register_config(auto: Any) -> None:
    """`AutoConfig` finds the config of a dualres model by its `model_type`."""
    config = importlib.import_module("dualres.hub.hf_config").DualResConfig
    auto.AutoConfig.register(config.model_type, config, exist_ok=True)


def register_model(auto: Any) -> None:
    """`AutoModelForCausalLM` finds the model by its config."""
    model = importlib.import_module("dualres.hub.hf_model").DualResForCausalLM
    auto.AutoModelForCausalLM.register(model.config_class, model, exist_ok=True)


STEPS: dict[str, Callable[[Any], None]] = {
    "transformers.models.auto.configuration_auto": register_config,
    "transformers.models.auto.modeling_auto": register_model,
}


def register() -> None:
    """Each step now if `transformers` has imported its module already, else as soon as someone imports it."""
    if importlib.util.find_spec("transformers") is None:
        return
    for name, step in STEPS.items():
        if name in sys.modules:
            step(sys.modules[name])
        else:
            sys.meta_path.insert(0, AfterImport(name, step))


class AfterImport(MetaPathFinder):
    """Lets the import of one module run as it would, then takes a step, once."""

    def __init__(self, name: str, step: Callable[[Any], None]):
        self.name, self.step = name, step

    def find_spec(self, name: str, path: Sequence[str] | None, target: ModuleType | None = None) -> ModuleSpec | None:
        """The spec that others find, with the step after the module has run."""
        if name != self.name:
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(name)
        if spec is None or spec.loader is None:
            return spec
        loader: Any = spec.loader
        run = loader.exec_module

        def run_and_step(module: ModuleType) -> None:
            run(module)
            with contextlib.suppress(ImportError):  # a transformers that is too old for us is still its user's
                self.step(module)

        loader.exec_module = run_and_step
        return spec
