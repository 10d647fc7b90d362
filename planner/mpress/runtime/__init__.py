"""What an emitted program imports: the engine, the context of a micro-batch, one-sided swaps.  Depends on torch only."""

from mpress.runtime.attention import sdpa_efficient, sdpa_efficient_bwd, sdpa_flash, sdpa_flash_bwd
from mpress.runtime.launch import main
from mpress.runtime.ops import dropout, dropout_bwd, keyed
from mpress.runtime.parameters import layers

__all__ = ["dropout", "dropout_bwd", "keyed", "layers", "main", "sdpa_efficient", "sdpa_efficient_bwd", "sdpa_flash", "sdpa_flash_bwd"]
