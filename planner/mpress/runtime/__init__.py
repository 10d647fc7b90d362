"""What an emitted program imports: the engine, the context of a micro-batch, one-sided swaps.  Depends on torch only."""

from mpress.runtime.launch import main
from mpress.runtime.ops import dropout, dropout_bwd, sdpa, sdpa_bwd
from mpress.runtime.parameters import layers

__all__ = ["dropout", "dropout_bwd", "layers", "main", "sdpa", "sdpa_bwd"]
