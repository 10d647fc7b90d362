"""An error of the user's step as a refusal of one screen: what, where, and one way out."""

from __future__ import annotations

from mpress.errors import InputError
from mpress.trace.source import error_source


def explained(error: BaseException, file: str) -> InputError:
    """The refusal of a step that raised `error`; `file` is the place where no line of the user's is known."""
    source = error_source(error.__traceback__)
    line = f" at `{source.code}`" if source.code else ""
    where = source.place(file)
    text = (str(error).strip().splitlines() or [""])[0]
    kind = type(error).__name__
    if out_of_memory(error):
        return host_memory(where, line)
    if "cuda" in str(error).lower():
        hint = "tracing needs no GPU: create tensors on the device of an input (device=x.device) and drop .cuda()"
        return InputError("device", f"the model asks for a CUDA device{line}", where, hint)
    if "numpy() is not supported" in text or (".numpy()" in text and "tensor subclass" in text):
        message = f"the model turns a tensor into numpy{line}, but plans are made without data"
        return InputError("data-dependent", message, where, "compute it with torch, or pass it as an input")
    if "no fake impl" in str(error) or kind == "UnsupportedOperatorException":
        message = f"an operator of an extension has no fake kernel{line}: {text}"
        return InputError("trace", message, where, "say what its result looks like with torch.library.register_fake")
    if isinstance(error, SystemExit):
        return InputError(
            "trace", f"the model ends the program{line}", where, "raise an error, or move the exit under `if __name__ == '__main__'`"
        )
    hint = "run the model once on CPU with example_inputs; if that works, this operator cannot be traced yet"
    return InputError("trace", f"the model failed{line}: {kind}: {text}", where, hint)


def out_of_memory(error: BaseException) -> bool:
    """Whether the host ran out of memory."""
    return isinstance(error, MemoryError) or "can't allocate memory" in str(error)


def host_memory(where: str, line: str = "") -> InputError:
    """The refusal of code that allocates more than this machine has."""
    hint = "make large tensors in build_model, which runs on the 'meta' device and allocates nothing, or a smaller --micro-batch"
    return InputError("host-memory", f"this machine has not enough memory for what the file allocates{line}", where, hint)
