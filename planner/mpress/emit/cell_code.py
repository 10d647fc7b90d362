"""The function pair of one cell type in one mode, line by line from its CellProgram."""

from __future__ import annotations

from collections.abc import Sequence

from mpress.cells import Cell, Chain
from mpress.emit.expressions import Expressions
from mpress.emit.forms import results
from mpress.emit.names import LocalNames, identifier, unique
from mpress.graph import Contribution, Graph
from mpress.program import CellProgram, Line, Verb
from mpress.units import gib

WIDTH = 140
_COMMENT_COLUMN = 96


def type_stems(chain: Chain) -> tuple[str, ...]:
    """A name for every cell type, unique in the module: "h.3.attn" -> "h_attn"; the layer number goes, all cells of a type share it.

    Types that would share a name are numbered, never merged: two functions of one name would silently run the wrong body.
    """
    stems: list[str] = []
    for index in chain.representatives:
        words = [word for word in chain.cells[index].name.replace("/", ".part").split(".") if word and not word.isdigit()]
        wanted = identifier("_".join(words)) if words else "cell"
        stems.append(unique(wanted, stems))
    return tuple(stems)


def cell_functions(graph: Graph, cell: Cell, program: CellProgram, stem: str, used_by: str) -> list[str]:
    """Source lines of `<stem>_fwd` and `<stem>_bwd` for the representative `cell`; no `<stem>_bwd` where no gradient gets to it."""
    writer = _Writer(graph, cell, program)
    names = writer.names
    inputs = ", ".join(names.of(t) for t in cell.inputs)
    gradients = ", ".join(names.of(t) for t in cell.gradient_inputs)
    text = [f"def {stem}_fwd(c, p{', ' + inputs if inputs else ''}):", *_docstring(used_by, writer.decisions())]
    text += writer.body(program.forward)
    text += [f"    return {_returned([writer.expressions.tensor(t) for t in cell.outputs])}", "", ""]
    if untrained(cell):
        return text
    text.append(f"def {stem}_bwd(c, p{', ' + gradients if gradients else ''}):")
    text += writer.body(program.backward)
    results = [writer.expressions.tensor(t) for t in cell.gradient_outputs]
    if results:
        text.append(f"    return {_returned(results)}")
    elif not program.backward:
        text.append("    return None")
    return [*text, "", ""]


def untrained(cell: Cell) -> bool:
    """No gradient gets to the cell: neither it nor anything before it is trained, so it has no backward."""
    return not (cell.gradient_inputs or cell.backward or cell.contributions)


def _returned(words: list[str]) -> str:
    return ", ".join(words) if words else "None"


def _docstring(used_by: str, decisions: list[str]) -> list[str]:
    if not decisions:
        return [f'    """{used_by}: everything is kept."""']
    return [f'    """{used_by}.', "", *(f"    {line}" for line in decisions), '    """']


class _Writer:
    def __init__(self, graph: Graph, cell: Cell, program: CellProgram) -> None:
        self.graph, self.cell, self.program = graph, cell, program
        self.names = LocalNames(graph, cell)
        self.expressions = Expressions(graph, cell, self.names)

    def decisions(self) -> list[str]:
        """What the mode does to each saved storage, in words."""
        lines = []
        made = {
            self.graph.tensors[t].storage: t for i in reversed(self.cell.forward) for t in self.graph.ops[i].outputs if self.names.has(t)
        }
        made |= {self.graph.tensors[t].storage: t for t in self.cell.inputs}
        for title, storages in (("recomputed in the backward", self.program.recompute), ("swapped out", self.program.swap)):
            if storages:
                words = [f"{self.names.of(made[s])} ({gib(self.graph.storages[s].bytes)})" for s in storages]
                lines += _wrapped(f"{title}: ", words)
        return lines

    def body(self, lines: Sequence[Line]) -> list[str]:
        text: list[str] = []
        at = 0
        while at < len(lines):
            written, at = self._straight_into_gradient(lines, at) or (self._line(lines[at]), at + 1)
            text += written
        return text

    def _straight_into_gradient(self, lines: Sequence[Line], at: int) -> tuple[list[str], int] | None:
        """A result that only goes into a gradient buffer needs no name: COMPUTE, GRAD and DELETE in one line.

        A DELETE in between moves behind the addition, which is in place, so no peak changes.
        """
        line, stop, dead = lines[at], at + 1, list[int]()
        if line.verb is not Verb.COMPUTE or self.graph.ops[line.op].multi or len(self.graph.ops[line.op].outputs) != 1:
            return None
        made = self.graph.ops[line.op].outputs[0]
        if not self.names.has(made):
            return None
        if stop < len(lines) and lines[stop].verb is Verb.DELETE:
            dead += lines[stop].tensors
            stop += 1
        if made in dead or stop == len(lines) or lines[stop].verb is not Verb.GRAD:
            return None
        contribution = self.graph.contributions[lines[stop].op]
        value, name = self.expressions.tensor(contribution.tensor), self.names.of(made)
        if value != name and not value.startswith(f"{name}."):
            return None
        stop += 1
        if stop < len(lines):
            if lines[stop].verb is not Verb.DELETE or made not in lines[stop].tensors:
                return None
            dead += [t for t in lines[stop].tensors if t != made]
            stop += 1
        op = self.graph.ops[line.op]
        call = self.expressions.call(op)
        if value != name and not one_call(call):
            call = f"({call})"
        written = statement(f"{self._gradient(contribution)} += ", call, value[len(name) :], op.source.place())
        return written + self._line(Line(Verb.DELETE, -1, tuple(dead))), stop

    def _gradient(self, contribution: Contribution) -> str:
        return f'p.grad["{self.expressions.parameter(contribution.parameter)}"]'

    def _line(self, line: Line) -> list[str]:
        names = [self.names.of(t) for t in line.tensors if self.names.has(t)]  # what was written in place has one name only
        if line.verb is Verb.DELETE:
            return [f"    del {', '.join(names)}"] if names else []
        if line.verb is Verb.SAVE:
            return _call("    c.save(", [f"{name}={name}" for name in names], ")", "")
        if line.verb is Verb.SWAP_OUT:
            sizes = " + ".join(gib(self.graph.storages[self.graph.tensors[t].storage].bytes) for t in line.tensors)
            return _call("    c.swap_out(", [f"{name}={name}" for name in names], ")", f"{sizes} to the pools of the schedule")
        if line.verb is Verb.LOAD:
            return _call(f"    {', '.join(names)} = c.load(", [f'"{name}"' for name in names], ")", "")
        if line.verb is Verb.GRAD:
            contribution = self.graph.contributions[line.op]
            return [f"    {self._gradient(contribution)} += {self.expressions.tensor(contribution.tensor)}"]
        return self._operator(line)

    def _operator(self, line: Line) -> list[str]:
        op = self.graph.ops[line.op]
        origin = op.source.place()
        comment = f"recompute  {origin}" if line.verb is Verb.RECOMPUTE else origin
        text = self.expressions.call(op)
        if op.mutates and all(not self.names.has(t) for t in op.outputs if t >= 0):
            target = ""
        else:
            # what was saved anyway is made twice: the second one must not live on as a local
            kept = {self.graph.tensors[t].storage for t in self.program.saved} if line.verb is Verb.RECOMPUTE else set[int]()
            twice = {t for t in results(op) if t >= 0 and self.graph.tensors[t].storage in kept}
            words = [self.names.of(t) if t >= 0 and self.names.has(t) and t not in twice else "_" for t in results(op)]
            target = f"{words[0]}, = " if op.multi and len(words) == 1 else f"{', '.join(words)} = "
            if twice:
                return [*statement(target, text, "", comment), "    del _"]
        return statement(target, text, "", comment)


def one_call(text: str) -> bool:
    """Whether the text is a single call, `f(...)`: views may follow it as they are, and it may be broken at its commas.

    "a.t() + b.t()" ends in a bracket too, but is none.
    """
    head, bracket, rest = text.partition("(")
    if not bracket or not head.replace(".", "").replace("_", "").isalnum():
        return False
    depth = 1
    for place, character in enumerate(rest):
        depth += (character in "([") - (character in ")]")
        if depth == 0:
            return place == len(rest) - 1
    return False


def statement(target: str, text: str, views: str, comment: str) -> list[str]:
    """`target text views`, broken at the arguments of the call where it is too long."""
    whole = f"    {target}{text}{views}"
    if len(whole) <= WIDTH - 4 or not one_call(text):
        return [_commented(whole, comment)]
    head, _, inner = text.partition("(")
    return _call(f"    {target}{head}(", _split_arguments(inner[:-1]), f"){views}", comment)


def _commented(code: str, comment: str) -> str:
    return f"{code.ljust(_COMMENT_COLUMN)}  # {comment}" if comment else code


def _call(head: str, arguments: list[str], tail: str, comment: str) -> list[str]:
    """One line where it fits, else the arguments in as few lines as hold them."""
    whole = head + ", ".join(arguments) + tail
    if len(whole) <= WIDTH - 4:
        return [_commented(whole, comment)]
    lines, line = list[str](), "       "
    for argument in arguments:
        if len(line) + len(argument) + 2 > WIDTH - 16 and line.strip():
            lines.append(line)
            line = "       "
        line += f" {argument},"
    return [_commented(head, comment), *lines, line, f"    {tail}"]


def _split_arguments(text: str) -> list[str]:
    """Split at top-level commas."""
    parts, depth, start = [], 0, 0
    for place, character in enumerate(text):
        depth += (character in "([") - (character in ")]")
        if character == "," and depth == 0:
            parts.append(text[start:place].strip())
            start = place + 1
    return [*parts, text[start:].strip()]


def _wrapped(head: str, words: list[str]) -> list[str]:
    lines, line = [], head
    for word in words:
        if len(line) + len(word) > 116 and line != head:
            lines.append(line.rstrip())
            line = "    "
        line += word + ", "
    return [*lines, line.removesuffix(", ")]
