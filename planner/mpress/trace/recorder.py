"""Watches a training step on fake tensors: every ATen call with its tensors, module and line, and the forward call it differentiates."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import DataDependentOutputException, DynamicOutputShapeException, FakeTensor, FakeTensorMode
from torch.autograd import graph as autograd_graph
from torch.utils._python_dispatch import TorchDispatchMode

from mpress.errors import InputError, MpressError
from mpress.graph import Argument, Kind, Ref
from mpress.trace.calls import CONSTANTS, Call, Traits, collect, hidden_writes, traits_of
from mpress.trace.checkpoints import Checkpoints
from mpress.trace.costs_of_ops import flops_of, moved_bytes
from mpress.trace.functions import Atoms
from mpress.trace.known_values import KnownValues
from mpress.trace.ledger import Ledger, Memory, Packed, Value
from mpress.trace.literals import MOST, TARGET, literal_arguments
from mpress.trace.semantics import draws
from mpress.trace.source import NOWHERE, current_source

ACCUMULATE = 2**64 - 1  # the sequence number of AccumulateGrad nodes
_engine: Any = torch.autograd  # private functions, absent from torch's stubs
_aten: Any = torch.ops.aten
_ENGINE_CODE = autograd_graph._engine_run_backward.__code__
_ADDS = ("aten.add.Tensor", "aten.add_.Tensor")
_LIFTS = (_aten.lift_fresh.default, _aten.lift_fresh_copy.default)


class Recorder(TorchDispatchMode):  # type: ignore[no-untyped-call]  # torch leaves the base class untyped
    """The dispatch mode.  Use: `adopt` state and inputs; run the forward in `listening`; `start_backward`; run the backward; `finish`.

    paths: dotted names of the modules; root: the class of the outermost one, which has no name.
    """

    def __init__(self, paths: dict[nn.Module, str], root: str, fakes: FakeTensorMode) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.calls: list[Call] = []
        self.ledger = Ledger()
        self.seed = -1
        self.stack: list[str] = [""]
        self.leaves: set[int] = set()  # ids of the parameters, which live all the time
        self.checkpoints = Checkpoints(self.calls)
        self.atoms = Atoms(self._function_ran)
        self.known = KnownValues(self.ledger, fakes, self.refusal)
        self._root = root
        self._paths = paths
        self._traits: dict[Any, Traits] = {}
        self._owners: dict[int, int] = {}
        self._draws: dict[str, int] = {}
        self._next_sequence = _engine._get_sequence_nr()
        self._backward = False
        self._paused = False
        self._view_written = False

    @property
    def values(self) -> list[Value]:
        return self.ledger.values

    @property
    def memories(self) -> list[Memory]:
        return self.ledger.memories

    # -- tensors -----------------------------------------------------------------------------------------------------------------

    def adopt(self, tensor: torch.Tensor, kind: Kind, name: str, real: torch.Tensor | None = None) -> int:
        """Register a parameter, buffer or input that exists before the step; `real` are the values of an example input."""
        number = self.ledger.add(tensor, kind, name)
        if kind is Kind.PARAMETER:
            self.leaves.add(id(tensor))
        if real is not None:
            self.known.shadows.give(tensor, real, frozenset((name,)))
        return number

    def find(self, tensor: torch.Tensor) -> int:
        """The value of a tensor object; another object with the same storage and layout is the same value."""
        known = self.ledger.find(tensor)
        if known is None:
            shape = "x".join(map(str, tensor.shape)) or "scalar"
            raise self.refusal(
                "constant",
                f"a tensor ({shape}) is used that is neither a parameter, a buffer, an input nor computed in the forward",
                "register it with self.register_buffer, or pass it as an input",
            )
        return known

    def pack(self, tensor: torch.Tensor) -> Packed | torch.Tensor:
        """Hook for saved_tensors_hooks: autograd saves this tensor."""
        return tensor if self._backward else self.ledger.pack(tensor)

    @staticmethod
    def unpack(packed: Packed | torch.Tensor) -> torch.Tensor:
        """Hook for saved_tensors_hooks."""
        return packed.tensor if isinstance(packed, Packed) else packed

    # -- modules -----------------------------------------------------------------------------------------------------------------

    def enter(self, module: nn.Module, _arguments: Any) -> None:
        """Global forward pre-hook."""
        self.stack.append(self._paths.get(module, self.stack[-1]))

    def leave(self, _module: nn.Module, _arguments: Any, _result: Any) -> None:
        """Global forward hook."""
        self.stack.pop()

    def refusal(self, code: str, message: str, hint: str) -> InputError:
        """A refusal that names the module and the line being run."""
        source = current_source()
        module = self.stack[-1] or self._root
        line = f": `{source.code}`" if source.code else ""
        return InputError(code, f"{message} in module '{module}'{line}", source.place(module), hint)

    # -- calls -------------------------------------------------------------------------------------------------------------------

    @contextmanager
    def listening(self) -> Iterator[None]:
        """Hear of checkpoints and custom functions, too."""
        with ExitStack() as stack:
            stack.enter_context(self.checkpoints.heard())
            stack.enter_context(self.atoms.heard())
            yield

    def start_backward(self, seed: torch.Tensor) -> None:
        """Everything from here on is the backward pass; `seed` is the gradient of the loss it starts from."""
        self._note_nodes(-1)
        self.ledger.end_forward()
        self._backward = True
        self.checkpoints.start_backward()
        self.seed = self.ledger.add(seed, Kind.COMPUTED, born=len(self.calls))

    def finish(self) -> None:
        """The step is over, whatever still lives outlives it."""
        self.ledger.close()

    def _function_ran(self) -> None:
        """The node of a custom Function that called nothing belongs to the last call."""
        self._note_nodes(len(self.calls) - 1)

    def _note_nodes(self, call: int) -> None:
        """Give the autograd nodes created since the last call their owner.

        A node exists before its call reaches the mode, so new ones belong to `call`; only writing into a view creates
        one afterwards (CopySlices), which belongs to the call before.
        """
        now = _engine._get_sequence_nr()
        for sequence in range(self._next_sequence, now):
            late = self._view_written and sequence == self._next_sequence
            self._owners[sequence] = call - 1 if late and call > 0 else call
        self._next_sequence = now
        self._view_written = False

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Calls in this block run but are not recorded."""
        self._paused = True
        try:
            yield
        finally:
            self._paused = False

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # wrapping this mode would import and call torch._dynamo, which is never used here

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None) -> Any:
        kwargs = kwargs or {}
        if self._paused or func is torch.ops.prim.device.default:
            return func(*args, **kwargs)
        traits = self._traits.get(func)
        if traits is None:
            if not isinstance(func, torch._ops.OpOverload):
                raise self.refusal("trace", f"the operator {func} runs other code", "call that code directly")
            traits = self._traits[func] = traits_of(func)
        device = kwargs.get("device")
        if device is not None and torch.device(device).type != "cpu":
            hint = "create tensors on the device of an input: device=x.device"
            raise self.refusal("device", f"the model asks for device '{device}'", hint)
        if func in _LIFTS and type(args[0]) is not FakeTensor:
            return self._from_python(func, args[0])
        args, kwargs, operands = self._operands(args, kwargs, traits)
        number = len(self.calls)
        self._note_nodes(number)
        if not self._backward:
            self.ledger.note_differentiable()
        try:
            result = self.known.read(func, args, kwargs, operands)
            if result is NotImplemented:
                result = func(*args, **kwargs)
        except MpressError:
            raise
        except (DataDependentOutputException, DynamicOutputShapeException) as error:
            result = self.known.shaped(func, args, kwargs, operands, error)
        if func is _aten.detach.default:  # the same value under another Python object
            self.ledger.stands_for(result, self.find(args[0]))
            return result
        if not isinstance(result, torch.Tensor | tuple | list) and result is not None:
            return result  # a Python number: whoever reads it has it
        items = list(result) if isinstance(result, tuple | list) else [result]
        node = torch._C._current_autograd_node() if self._backward else None
        sequence = node._sequence_nr() if node is not None else -1
        direct = self._backward and sys._getframe(1).f_code is _ENGINE_CODE
        if sequence == ACCUMULATE and direct and id(node.variable) in self.leaves:  # type: ignore[union-attr]
            self._bookkeeping(traits.target, items)
            return result
        call_args = tuple([self._argument(a) for a in args])
        call_kwargs = tuple([(key, self._argument(kwargs[key])) for key in sorted(kwargs)])
        mutates = [args[i] for i in traits.writes if i < len(args)] + [kwargs[k] for k in traits.keyword_writes if k in kwargs]
        mutates += hidden_writes(traits.target, args)
        written = [t for item in mutates for t in (item if isinstance(item, tuple | list) else [item]) if isinstance(t, torch.Tensor)]
        targets = tuple([self.find(t) for t in written])
        operand_memories = {self.ledger.memory(t) for t in operands}
        inputs = [self.values[self.find(t)] for t in operands] if self._backward else []
        before = len(self.memories)
        outputs = tuple(
            [self.ledger.add(t, Kind.COMPUTED, born=number, backward=self._backward) if isinstance(t, torch.Tensor) else -1 for t in items]
        )
        made = [self.values[o].storage for o in outputs if o >= 0]
        view = bool(made) and not targets and len(self.memories) == before and all(s in operand_memories for s in made)
        call = Call(
            traits.target, call_args, call_kwargs, outputs, isinstance(result, tuple | list), self._backward, self.stack[-1], NOWHERE, -1,
            view, targets, atom=self.atoms.name,
        )  # fmt: skip
        if self.checkpoints.repeating:
            self._repeat(call)
        elif self._backward:
            self._differentiate(call, sequence, direct, inputs)
        else:
            call.source = current_source()
            self._view_written = any(t._is_view() for t in written)
            call.random_key = self._random_key(call.module, func, args, kwargs, traits)
        if not view:
            call.flops = flops_of(func, args, kwargs, result)
            call.bytes_moved = moved_bytes(traits.target, operands, [t for t in items if isinstance(t, torch.Tensor)])
        self._append(call)
        if not self._backward or self.checkpoints.repeating:
            self.known.shadows.follow(traits.target, func, args, kwargs, operands, written, result, traits.random)
        return result

    def _append(self, call: Call) -> None:
        self.ledger.last = len(self.calls)
        self.calls.append(call)

    def _bookkeeping(self, target: str, items: list[Any]) -> None:
        """AccumulateGrad copies or adds a gradient: memory that is there, but no part of the graph."""
        number = len(self.calls)
        outputs = tuple([self.ledger.add(t, Kind.COMPUTED, born=number, backward=True) for t in items if isinstance(t, torch.Tensor)])
        self._append(Call(target, (), (), outputs, False, True, "", NOWHERE, -1, engine=True))

    def _repeat(self, call: Call) -> None:
        """A call of a region that the user's checkpoint runs again."""
        original = self.checkpoints.original(call.target, call.args, call.kwargs)
        if original < 0:
            raise self.refusal(
                "activation-checkpoint",
                f"what torch.utils.checkpoint runs again in the backward ({call.target}) is not what it ran in the forward",
                "make the function deterministic, or take the checkpoint out: the planner decides itself what is recomputed",
            )
        first = self.calls[original]
        self.checkpoints.pair(call.outputs, original)
        call.repeats, call.module, call.source, call.random_key = original, first.module, first.source, first.random_key

    def _forward_of(self, call: int) -> int:
        """The forward call that a node created in this call stands for."""
        found = self.calls[call]
        if not found.backward:
            return call
        return found.repeats if found.repeats >= 0 else found.forward

    def _differentiate(self, call: Call, sequence: int, direct: bool, inputs: list[Value]) -> None:
        """A call of the backward proper: what it differentiates, or that it only adds up gradients."""
        owner = self._owners.get(sequence, -1)
        if owner < 0 and sequence == ACCUMULATE:  # a hook of a leaf goes on with what made its gradient
            owner = next((v.call for v in inputs if v.backward and 0 <= v.call < len(self.calls)), -1)
        forward = self._forward_of(owner) if owner >= 0 else -1
        if forward >= 0:
            call.module, call.source = self.calls[forward].module, self.calls[forward].source
        plain_add = direct and call.target in _ADDS and len(call.args) == len(inputs) == 2 and not call.kwargs
        call.summing = plain_add and all(v.backward for v in inputs)
        call.forward = -1 if call.summing else forward

    def _random_key(self, module: str, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], traits: Traits) -> str:
        if not traits.random or not draws(func, args, kwargs):
            return ""
        draw = self._draws.get(module, 0)
        self._draws[module] = draw + 1
        return f"{module}#{draw}"

    # -- arguments ---------------------------------------------------------------------------------------------------------------

    def _operands(
        self, args: tuple[Any, ...], kwargs: dict[str, Any], traits: Traits
    ) -> tuple[tuple[Any, ...], dict[str, Any], list[torch.Tensor]]:
        """The tensors among the arguments; real ones (attributes of modules, numpy) give way to fake ones of the same values."""
        found: list[torch.Tensor] = []
        collect(args, found)
        if kwargs:
            collect(kwargs.values(), found)
        if all(type(t) is FakeTensor for t in found):
            return args, kwargs, found
        args, kwargs = self.known.fake_arguments(args, kwargs, self._from_attribute)
        written = [args[i] for i in traits.writes if i < len(args)]
        if any(self.known.is_stand_in(t) for t in written if isinstance(t, torch.Tensor)):
            raise self.refusal("constant", "a plain tensor attribute is written in place", "register it with self.register_buffer")
        found.clear()
        collect((*args, *kwargs.values()), found)
        return args, kwargs, found

    def _argument(self, value: Any) -> Argument:
        if isinstance(value, torch.Tensor):
            if not self._backward and value.requires_grad:
                self.values[self.find(value)].differentiable = True
            return Ref(self.find(value))
        if value is None or isinstance(value, bool | int | float | str):
            return value
        if isinstance(value, tuple | list):
            return tuple([self._argument(item) for item in value])
        convert = CONSTANTS.get(type(value))
        if convert is None:
            kind = type(value).__name__
            raise self.refusal("trace", f"an operator takes an argument of type {kind}", "this kind of argument cannot be planned yet")
        return convert(value)

    def _from_python(self, func: Any, real: torch.Tensor) -> torch.Tensor:
        """`torch.tensor([1.0, 2.0])`."""
        if real.numel() > MOST:
            raise self._too_long(real)
        result: torch.Tensor = func(real)
        self._literal(real, result, born=len(self.calls))
        return result

    def _from_attribute(self, real: torch.Tensor, fake: torch.Tensor) -> None:
        """A tensor that exists outside of the step and is no part of the module's state."""
        if real.is_meta:
            kind = "parameter" if isinstance(real, nn.Parameter) else "tensor"
            raise self.refusal(
                "constant",
                f"a {kind} ({'x'.join(map(str, real.shape)) or 'scalar'}) made with the model is used that is no registered part of it",
                f"keep it with self.register_{'parameter' if kind == 'parameter' else 'buffer'}",
            )
        if real.numel() > MOST:
            raise self._too_long(real)
        self._literal(real, fake, born=-1)

    def _too_long(self, real: torch.Tensor) -> InputError:
        message = f"a tensor of {real.numel()} numbers that are no part of the module's state is used (at most {MOST} can be written down)"
        return self.refusal("constant", message, "register it once with self.register_buffer")

    def _literal(self, real: torch.Tensor, fake: torch.Tensor, born: int) -> None:
        output = self.ledger.add(fake, Kind.COMPUTED, born=born, backward=self._backward)
        args = literal_arguments(real)
        call = Call(TARGET, args, (), (output,), False, self._backward, self.stack[-1], current_source(), -1, atom=self.atoms.name)
        call.bytes_moved = real.numel() * real.element_size()
        if self.checkpoints.repeating and born >= 0:
            self._repeat(call)
        self._append(call)
        self.known.shadows.give(fake, real, frozenset())
