"""How the ranks of a test share a model."""

from typing import Any, NamedTuple


class Layout(NamedTuple):
    """How many ranks share tensors and experts, and whether those that share tensors share the tokens between them."""

    tensor: int = 1
    sequence: bool = False
    expert: int = 1
    expert_tensor: int = 1  # ranks that share the tensors of an expert

    @property
    def ranks(self) -> int:
        return max(self.tensor, self.expert)

    @property
    def replicas(self) -> int:
        """Ranks that have a part of the batch to themselves."""
        return self.ranks // self.tensor

    def sizes(self) -> dict[str, Any]:
        """In Megatron's words."""
        return {
            "tensor_model_parallel_size": self.tensor,
            "expert_model_parallel_size": self.expert,
            "expert_tensor_parallel_size": self.expert_tensor,
        }


LAYOUTS = {
    "tp1": Layout(),
    "tp2": Layout(tensor=2, expert_tensor=2),
    "tp2-sp": Layout(tensor=2, sequence=True, expert_tensor=2),
    "ep2": Layout(expert=2),
    "tp2-sp-ep2": Layout(tensor=2, sequence=True, expert=2),
}
