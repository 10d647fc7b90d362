"""What makes a schedule file belong to a module: the computation itself, not its text."""

from __future__ import annotations

from hashlib import sha256

from mpress.graph import Graph


def fingerprint(graph: Graph) -> str:
    """SHA-256 over operators, operand positions, constants, shapes and user names; no lines, paths, devices or versions."""
    digest = sha256()
    for op in (*graph.ops, *graph.setup):
        digest.update(repr((op.target, op.args, op.kwargs, op.outputs, op.phase.value, op.forward_op, op.random_key)).encode())
    for tensor in graph.tensors:
        digest.update(repr((tensor.storage, tensor.shape, tensor.stride, tensor.offset, tensor.dtype, tensor.name)).encode())
    for entry in graph.parameters:
        digest.update(repr((entry.names, entry.tensor, entry.trainable)).encode())
    for buffer in graph.buffers:
        digest.update(repr((buffer.names, buffer.tensor, buffer.persistent, buffer.initial)).encode())
    digest.update(repr((graph.micro_batch, graph.loss, graph.seed, graph.contributions)).encode())
    return digest.hexdigest()
