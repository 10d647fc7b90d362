"""The only door to the solver: named variables and rows in, values and a bound out.  Why SCIP: docs/decisions/0002-solver.md.

Work is limited in branch-and-bound nodes, never in seconds; one thread, one seed: the same model gives the same answer.
"""

from __future__ import annotations

import threading
from dataclasses import dataclass, field
from enum import Enum

from ortools.linear_solver import pywraplp

INFINITY = float("inf")
SOLVER = "SCIP"


class Status(Enum):
    OPTIMAL = "optimal"
    LIMIT = "limit"
    INFEASIBLE = "infeasible"
    INTERRUPTED = "interrupted"


STATUS_MAP = {
    pywraplp.Solver.OPTIMAL: Status.OPTIMAL,
    pywraplp.Solver.FEASIBLE: Status.LIMIT,
    pywraplp.Solver.INFEASIBLE: Status.INFEASIBLE,
    pywraplp.Solver.UNBOUNDED: Status.INFEASIBLE,
    pywraplp.Solver.ABNORMAL: Status.LIMIT,
    pywraplp.Solver.NOT_SOLVED: Status.LIMIT,
}


class Linear:
    """A linear expression: coefficients by variable, and a constant."""

    __slots__ = ("constant", "terms")

    def __init__(self, terms: dict[int, float] | None = None, constant: float = 0.0) -> None:
        self.terms: dict[int, float] = terms if terms is not None else {}
        self.constant = constant

    def add(self, other: Linear, factor: float = 1.0) -> Linear:
        """Add factor x other in place; returns itself."""
        if factor != 0.0:
            for variable, value in other.terms.items():
                self.terms[variable] = self.terms.get(variable, 0.0) + factor * value
            self.constant += factor * other.constant
        return self

    def term(self, variable: int, value: float) -> Linear:
        """Add one coefficient in place; returns itself."""
        if value != 0.0:
            self.terms[variable] = self.terms.get(variable, 0.0) + value
        return self

    def copy(self) -> Linear:
        return Linear(dict(self.terms), self.constant)

    def value(self, values: tuple[float, ...]) -> float:
        return self.constant + sum(c * values[v] for v, c in self.terms.items())


def total(*parts: tuple[float, Linear]) -> Linear:
    """Sum of factor x expression."""
    result = Linear()
    for factor, part in parts:
        result.add(part, factor)
    return result


@dataclass(slots=True)
class Model:
    """Variables (name, lower, upper, integer) and rows (name, expression, lower, upper); minimise `objective`."""

    variables: list[tuple[str, float, float, bool]] = field(default_factory=list)
    rows: list[tuple[str, Linear, float, float]] = field(default_factory=list)
    objective: Linear = field(default_factory=Linear)

    def variable(self, name: str, lower: float = 0.0, upper: float = INFINITY, integer: bool = False) -> int:
        self.variables.append((name, lower, upper, integer))
        return len(self.variables) - 1

    def at_most(self, name: str, left: Linear, right: float = 0.0) -> None:
        """left <= right"""
        self.rows.append((name, left, -INFINITY, right))

    def at_least(self, name: str, left: Linear, right: float = 0.0) -> None:
        """left >= right"""
        self.rows.append((name, left, right, INFINITY))

    def equal(self, name: str, left: Linear, right: float = 0.0) -> None:
        """left == right"""
        self.rows.append((name, left, right, right))

    def fix(self, variable: int, value: float) -> None:
        name, _, _, integer = self.variables[variable]
        self.variables[variable] = (name, value, value, integer)


@dataclass(frozen=True, slots=True)
class Result:
    """values is empty when no solution was found.  bound: proven lower bound on the objective.  nodes: work done."""

    status: Status
    values: tuple[float, ...]
    objective: float
    bound: float
    nodes: int


def solve(model: Model, gap: float, nodes: int, hint: tuple[float, ...] = (), relax: bool = False) -> Result:
    """Minimise.  `relax` drops integrality (a linear program).  A KeyboardInterrupt stops the solver and gives Status.INTERRUPTED."""
    solver = pywraplp.Solver.CreateSolver("GLOP" if relax else SOLVER)
    infinity = solver.infinity()
    columns = [
        solver.IntVar(lower, min(upper, infinity), name) if integer and not relax else solver.NumVar(lower, min(upper, infinity), name)
        for name, lower, upper, integer in model.variables
    ]
    for name, left, low, high in model.rows:
        row = solver.Constraint(max(low - left.constant, -infinity), min(high - left.constant, infinity), name)
        for variable, value in left.terms.items():
            row.SetCoefficient(columns[variable], value)
    goal = solver.Objective()
    for variable, value in model.objective.terms.items():
        goal.SetCoefficient(columns[variable], value)
    goal.SetOffset(model.objective.constant)
    goal.SetMinimization()
    parameters = pywraplp.MPSolverParameters()
    if not relax:
        solver.SetNumThreads(1)
        parameters.SetDoubleParam(pywraplp.MPSolverParameters.RELATIVE_MIP_GAP, max(gap, 0.0))
        solver.SetSolverSpecificParametersAsString(f"misc/catchctrlc = FALSE\nlimits/totalnodes = {max(nodes, 1)}\n")
        if hint:
            solver.SetHint(columns, list(hint))
    code, interrupted = _run(solver, parameters)
    status = Status.INTERRUPTED if interrupted else STATUS_MAP.get(code, Status.LIMIT)
    found = code in (pywraplp.Solver.OPTIMAL, pywraplp.Solver.FEASIBLE)
    values = tuple(float(column.solution_value()) for column in columns) if found else ()
    objective = float(goal.Value()) if found else INFINITY
    if status is Status.INFEASIBLE:
        bound = INFINITY
    elif relax:
        bound = objective if status is Status.OPTIMAL else -INFINITY
    else:
        bound = float(goal.BestBound())
    return Result(status, values, objective, bound, 0 if relax else int(solver.nodes()))


def _run(solver: pywraplp.Solver, parameters: pywraplp.MPSolverParameters) -> tuple[int, bool]:
    """Solve in a thread, so that this one still hears Ctrl-C; returns the solver's code and whether it was interrupted."""
    codes: list[int] = []
    worker = threading.Thread(target=lambda: codes.append(int(solver.Solve(parameters))), daemon=True)
    worker.start()
    interrupted = False
    while worker.is_alive():
        try:
            worker.join(0.2)
        except KeyboardInterrupt:
            interrupted = True
            solver.InterruptSolve()
    return (codes[0] if codes else int(pywraplp.Solver.ABNORMAL)), interrupted
