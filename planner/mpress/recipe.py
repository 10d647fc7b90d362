"""The training recipe: how many bytes a parameter costs all step long, and what the optimizer step reads and writes.

With a 16-bit precision the optimizer steps an fp32 master copy; the gradient of the one parameter being stepped is copied to fp32.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum


class Precision(Enum):
    FP32 = "fp32"
    FP16 = "fp16"
    BF16 = "bf16"


class Optimizer(Enum):
    ADAMW = "adamw"
    SGD = "sgd"
    SGD_MOMENTUM = "sgd-momentum"


_DTYPES = {Precision.FP32: "float32", Precision.FP16: "float16", Precision.BF16: "bfloat16"}
_STATES = {Optimizer.ADAMW: 2, Optimizer.SGD: 0, Optimizer.SGD_MOMENTUM: 1}


@dataclass(frozen=True, slots=True)
class Recipe:
    """Precision of weights and activations, and the optimizer.  All sizes are bytes per parameter element unless said otherwise."""

    precision: Precision
    optimizer: Optimizer

    @property
    def dtype(self) -> str:
        """Torch's name of the precision, "bfloat16" for bf16."""
        return _DTYPES[self.precision]

    @property
    def weight_bytes(self) -> int:
        return 4 if self.precision is Precision.FP32 else 2

    @property
    def gradient_bytes(self) -> int:
        return self.weight_bytes

    @property
    def master_bytes(self) -> int:
        """The fp32 copy the optimizer steps; the weight itself when that is fp32."""
        return 0 if self.precision is Precision.FP32 else 4

    @property
    def state_bytes(self) -> int:
        """fp32 optimizer state: two moments (AdamW), one (SGD with momentum) or none."""
        return 4 * _STATES[self.optimizer]

    @property
    def bytes_per_trainable(self) -> int:
        return self.weight_bytes + self.gradient_bytes + self.master_bytes + self.state_bytes

    @property
    def bytes_per_frozen(self) -> int:
        """A frozen parameter has neither gradient nor state."""
        return self.weight_bytes

    @property
    def bytes_per_tensor(self) -> int:
        """Bytes per trainable tensor whatever its size: AdamW keeps its step counter in a tensor of one float."""
        return 4 if self.optimizer is Optimizer.ADAMW else 0

    @property
    def step_bytes_per_element(self) -> int:
        """Temporary bytes per element of the one parameter being stepped: the fp32 copy of a 16-bit gradient."""
        return 0 if self.precision is Precision.FP32 else 4

    @property
    def step_traffic_bytes(self) -> int:
        """Bytes the optimizer step reads and writes: gradient read and zeroed, state and master (or weight) read and written; with
        16 bits also the fp32 gradient written and read, and the new weight written."""
        traffic = 2 * self.gradient_bytes + 2 * self.state_bytes + 2 * 4
        if self.precision is not Precision.FP32:
            traffic += 2 * self.step_bytes_per_element + self.weight_bytes
        return traffic

    def words(self) -> str:
        """The bytes in words: "16 B/parameter: 2 weight + 2 gradient + 4 master weight + 4 + 4 AdamW moments"."""
        parts = [f"{self.weight_bytes} weight", f"{self.gradient_bytes} gradient"]
        if self.master_bytes:
            parts.append(f"{self.master_bytes} master weight")
        if self.optimizer is Optimizer.ADAMW:
            parts.append("4 + 4 AdamW moments")
        elif self.optimizer is Optimizer.SGD_MOMENTUM:
            parts.append("4 momentum")
        return f"{self.bytes_per_trainable} B/parameter: {' + '.join(parts)}"
