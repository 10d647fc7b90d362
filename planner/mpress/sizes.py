"""Which micro-batch size: several are planned for one optimizer step of so many samples, and the fastest plan stays.

All sizes together do at most 2.5 times the work of one: each is first planned coarsely, and only until it is proven slower than the best
so far; then those are planned to the wanted gap whose proven bound still beats the best plan.  What a plan is, is none of this module's
business: `choose` is given a way to plan one size and a way to confirm it.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Generic, TypeVar

from mpress.errors import InfeasibleError, InputError, MpressError
from mpress.options import Options
from mpress.units import Bytes, Seconds, gib

AUTO_SIZES = 8  # powers of two that `auto` tries at most
COARSE = 0.05  # gap of a first plan
_SURVEY = 0.5  # of the work limit, for all first plans together
_REFINE = 1.0  # for the first plan to the wanted gap; half of it for the next, and so on

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Choices:
    """What there is to choose from.  skipped: sizes that do not divide the samples of a step."""

    samples: int
    sizes: tuple[int, ...]
    skipped: tuple[int, ...]
    auto: bool


@dataclass(frozen=True, slots=True)
class Effort:
    """How hard to plan one size.  share: of the work limit; enough: seconds from which on a step is too slow to be wanted."""

    gap: float
    share: float = 1.0
    enough: float = math.inf


class TooSlow(Exception):
    """A size has no plan yet, and none it could have is fast enough.  fits: it has one; None where that is not known."""

    def __init__(self, bound_seconds: float, fits: bool | None) -> None:
        super().__init__(f"a step takes at least {bound_seconds:.4g} s")
        self.bound_seconds, self.fits = bound_seconds, fits


@dataclass(frozen=True, slots=True)
class Trial(Generic[T]):
    """One size planned: what the solver proved, and the plan in the caller's terms."""

    size: int
    step_seconds: Seconds
    bound_seconds: Seconds
    gap: float
    status: str
    result: T


@dataclass(frozen=True, slots=True)
class SizeRow:
    """One size in the report.  step_seconds, samples_per_second and gap are -1 where no plan was made; words say why, or how good it is.

    status: "chosen", "slower", "no-plan", "refused" or "skipped".  fits: None where that is not known.
    missing_bytes: what the worst stage is short of, where that is known.
    """

    micro_batch: int
    micro_batches: int
    status: str
    step_seconds: Seconds
    samples_per_second: float
    gap: float
    fits: bool | None
    missing_bytes: Bytes
    words: str


@dataclass(frozen=True, slots=True)
class Choice(Generic[T]):
    """The best size, its status held against the wanted gap, and a row for each size."""

    best: Trial[T]
    rows: tuple[SizeRow, ...]


def per_step(options: Options, size: int) -> int:
    """Micro-batches of an optimizer step at one size."""
    if options.global_batch is None:
        return options.micro_batches
    count, rest = divmod(options.global_batch, size)
    if rest or not count:
        message = f"--global-batch {options.global_batch} is no multiple of the micro-batch of {size}"
        raise InputError("option", message, "--global-batch", f"ask for {max(count, 1) * size} samples, or another --micro-batch")
    return count


def choices(options: Options) -> Choices:
    """The sizes to try.  Without --global-batch a step has as many samples as --micro-batches of the smallest size."""
    listed = options.sizes or ()
    samples = options.micro_batches * min(listed, default=1) if options.global_batch is None else options.global_batch
    wanted = listed or tuple(2**k for k in range(AUTO_SIZES) if 2**k <= samples)
    sizes = tuple(size for size in sorted(wanted) if samples % size == 0)
    if not sizes:
        message = f"no --micro-batch of {_list(sorted(wanted))} divides the {samples} samples of a step"
        raise InputError("option", message, "--global-batch", "ask for a multiple of them")
    skipped = tuple(size for size in sorted(wanted) if listed and samples % size)
    return Choices(samples, sizes, skipped, not listed)


def check_step(options: Options) -> None:
    """Refuse sizes that no step of --global-batch samples can have, before anything is traced."""
    if options.sizes is None:
        per_step(options, options.recording.micro_batch)
    else:
        choices(options)


def refuse_sizes(options: Options, what: str, hint: str) -> None:
    """For whatever has one size: refuse a list."""
    if options.sizes is not None:
        raise InputError("option", f"{what} has one micro-batch size, --micro-batch names several", "--micro-batch", hint)


def choose(
    among: Choices,
    gap: float,
    attempt: Callable[[int, Effort], Trial[T]],
    confirm: Callable[[Trial[T]], Trial[T]],
) -> Choice[T]:
    """The plan with the most samples per second, the smaller size where two are equal.

    `attempt` plans a size with some effort, or raises TooSlow; `confirm` returns the trial itself, or one in its place where what it was
    planned from was wrong.
    Sizes without a plan are rows; if there is none at all, the refusal of the smallest is raised.
    """
    search = _Choosing(among, gap, attempt)
    search.survey()
    while search.refine() or search.confirm(confirm):
        pass
    return Choice(search.judged(search.best), search.rows())


class _Choosing(Generic[T]):
    """What is known of each size so far."""

    def __init__(self, among: Choices, gap: float, attempt: Callable[[int, Effort], Trial[T]]) -> None:
        self.among, self.gap, self.attempt = among, gap, attempt
        self.trials: dict[int, Trial[T]] = {}
        self.refusals: dict[int, MpressError | TooSlow] = {}
        self.share = _REFINE
        self.settled: set[int] = set()
        self.interrupted = False

    @property
    def best(self) -> Trial[T]:
        return min(self.trials.values(), key=_rank)

    def survey(self) -> None:
        """Every size once, coarsely where there are several; `auto` ends at the first that does not fit, as larger ones need more."""
        count = len(self.among.sizes)
        for size in self.among.sizes:
            effort = Effort(max(self.gap, COARSE), _SURVEY / count, self._enough()) if count > 1 else Effort(self.gap)
            self._try(size, partial(self.attempt, size, effort))
            if self.interrupted or (self.among.auto and isinstance(self.refusals.get(size), InfeasibleError)):
                break
        open_ones = [size for size, error in self.refusals.items() if isinstance(error, MpressError) and error.code == "work-limit"]
        for size in open_ones if count > 1 else ():
            if not self.trials:
                self._try(size, partial(self.attempt, size, Effort(self.gap, self._next_share())))
        if not self.trials:
            raise self._nothing()

    def _enough(self) -> float:
        return self.best.step_seconds if self.trials else math.inf

    def _next_share(self) -> float:
        self.share /= 2
        return 2 * self.share

    def refine(self) -> bool:
        """Plan the most promising unsettled size to the wanted gap; False if none is left that could win."""
        if self.interrupted:
            return False
        best = self.best
        rivals = [trial for trial in self.trials.values() if trial.size not in self.settled and trial.gap > self.gap]
        rivals = [trial for trial in rivals if trial is best or trial.bound_seconds < best.step_seconds]
        if not rivals:
            return False
        coarse = min(rivals, key=_rank)
        enough = math.inf if coarse is best else best.step_seconds
        self._try(coarse.size, partial(self.attempt, coarse.size, Effort(self.gap, self._next_share(), enough)))
        fine = self.trials[coarse.size]
        bound = Seconds(max(coarse.bound_seconds, fine.bound_seconds))
        if coarse.step_seconds < fine.step_seconds:  # nodes ran out on another path
            fine = replace(coarse, bound_seconds=bound, gap=max(0.0, 1 - bound / coarse.step_seconds))
        self.trials[coarse.size] = fine
        self.settled.add(coarse.size)
        return True

    def confirm(self, confirm: Callable[[Trial[T]], Trial[T]]) -> bool:
        """Have the best confirmed; False if it stands, True if it was planned anew or fell."""
        best = self.best
        del self.trials[best.size]
        self._try(best.size, lambda: confirm(best))
        self.settled.add(best.size)
        if not self.trials:
            raise self._nothing()
        return self.trials.get(best.size) is not best

    def judged(self, trial: Trial[T]) -> Trial[T]:
        """A trial with the status it has under the wanted gap: it may have been planned coarsely only."""
        if trial.gap <= self.gap or trial.status == "interrupted":
            return trial
        return replace(trial, status="interrupted" if self.interrupted else "limit")

    def _try(self, size: int, make: Callable[[], Trial[T]]) -> None:
        try:
            self.trials[size] = make()
            self.interrupted |= self.trials[size].status == "interrupted"
            self.refusals.pop(size, None)
        except (InputError, InfeasibleError, TooSlow) as error:
            self.refusals[size] = error
        except KeyboardInterrupt:
            if not self.trials:
                raise
            self.interrupted = True
        except MpressError as error:
            if error.code == "interrupted" and self.trials:
                self.interrupted = True
            elif error.code == "work-limit":
                self.refusals[size] = error
            else:
                raise

    def _nothing(self) -> MpressError:
        smallest = min(self.refusals)
        first = self.refusals[smallest]
        assert isinstance(first, MpressError)  # without a plan nothing is too slow
        if len(self.refusals) > 1:
            first.message = f"no micro-batch of {_list(sorted(self.refusals))} can be planned; of {smallest}: {first.message}"
        return first

    def rows(self) -> tuple[SizeRow, ...]:
        """A row for each size, tried or not."""
        samples, best = self.among.samples, self.best
        rows = []
        for size in sorted((*self.among.sizes, *self.among.skipped)):
            count = samples // size
            trial = self.trials.get(size)
            if trial is not None:
                status = "chosen" if trial is best else "slower"
                words = trial.status if trial.gap <= self.gap else f"at most {100 * trial.gap:.1f} % from the best of this size"
                speed = samples / trial.step_seconds
                rows.append(SizeRow(size, count, status, trial.step_seconds, speed, trial.gap, True, Bytes(0), words))
                continue
            status, missing, fits, words = "skipped", 0, None, self._untried(size)
            error = self.refusals.get(size)
            if isinstance(error, InfeasibleError):
                status, missing, fits = "no-plan", error.missing_bytes, False
                words = f"misses {gib(missing)}" if missing else error.message
            elif isinstance(error, TooSlow):
                status, fits = "slower", error.fits
                words = f"{'fits, ' if fits else ''}at most {samples / error.bound_seconds:.4g} samples/s"
            elif error is not None:
                status, words = "refused", f"{error.code}: {error.message}"
            rows.append(
                SizeRow(size, 0 if size in self.among.skipped else count, status, Seconds(-1), -1.0, -1.0, fits, Bytes(missing), words)
            )
        return tuple(rows)

    def _untried(self, size: int) -> str:
        if size in self.among.skipped:
            return f"does not divide {self.among.samples} samples"
        return "interrupted" if self.interrupted else "not tried: a smaller one does not fit"


def _rank(trial: Trial[T]) -> tuple[float, int]:
    return trial.step_seconds, trial.size


def _list(sizes: list[int]) -> str:
    return ", ".join(map(str, sizes))
