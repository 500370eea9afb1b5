"""`MegatronPrecision`: the Trainer's `precision=` for a policy whose dtypes Megatron-core manages itself."""

from collections.abc import Callable
from typing import Any

import torch
from lightning.pytorch import LightningModule
from lightning.pytorch.plugins.precision import Precision
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from typing_extensions import override

_DTYPES = {"32-true": torch.float32, "bf16-mixed": torch.bfloat16, "bf16-true": torch.bfloat16}


class MegatronPrecision(Precision):
    """fp32, or bf16 weights with fp32 main weights and gradients in the optimizer.

    There is no autocast: Megatron casts its own modules. `bf16-mixed` and `bf16-true` mean the same here.

    Args:
        precision: `32-true`, `bf16-mixed` or `bf16-true`.

    Raises:
        MisconfigurationException: any other precision.
    """

    def __init__(self, precision: str = "32-true") -> None:
        if precision not in _DTYPES:
            raise MisconfigurationException(
                f"trainer.precision = {precision!r} is not supported by ColocatedRLStrategy; use one of {', '.join(_DTYPES)}"
            )
        self.precision = precision  # type: ignore[assignment]

    @property
    def params_dtype(self) -> torch.dtype:
        """dtype of the weights that compute."""
        return _DTYPES[str(self.precision)]

    @override
    def optimizer_step(  # type: ignore[override]
        self, optimizer: Any, model: LightningModule, closure: Callable[[], Any], **kwargs: Any
    ) -> Any:
        """Runs the closure, fires the hooks, and returns what Megatron's optimizer returns (it takes no closure)."""
        closure()
        self._after_closure(model, optimizer)
        return optimizer.step(**kwargs)
