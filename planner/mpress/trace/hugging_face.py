"""The training step a Hugging Face transformers configuration (config.json) stands for, as a ModelFile; everything after it is the same.

Offline: only the installed library is used.  No weight is allocated, no tokenizer is made, no code of a repository is executed.
The class is the one `architectures` names; where that has no loss, the library's mapping of the model type to a training task decides.
"""

from __future__ import annotations

import copy
import importlib
import json
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from mpress.errors import InputError
from mpress.graph_file import is_graph_file
from mpress.trace.as_eager import quiet
from mpress.trace.model_file import ModelFile, parse_value
from mpress.trace.training_inputs import Task, has_loss, make_inputs, plan_inputs

_MAPPINGS = (  # in order: a model type that has several is trained for the first
    (Task.SPEECH_TO_TEXT, "MODEL_FOR_SPEECH_SEQ_2_SEQ_MAPPING_NAMES"),
    (Task.SPEECH_CTC, "MODEL_FOR_CTC_MAPPING_NAMES"),
    (Task.VISION_LANGUAGE, "MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES"),
    (Task.SEQ2SEQ, "MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES"),
    (Task.MASKED, "MODEL_FOR_MASKED_LM_MAPPING_NAMES"),
    (Task.CAUSAL, "MODEL_FOR_CAUSAL_LM_MAPPING_NAMES"),
    (Task.CONTRASTIVE, "MODEL_FOR_ZERO_SHOT_IMAGE_CLASSIFICATION_MAPPING_NAMES"),
    (Task.IMAGE_CLASSES, "MODEL_FOR_IMAGE_CLASSIFICATION_MAPPING_NAMES"),
    (Task.SEQUENCE_CLASSES, "MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES"),
    (Task.TOKEN_CLASSES, "MODEL_FOR_TOKEN_CLASSIFICATION_MAPPING_NAMES"),
)
_TRACED_ATTENTION = ("sdpa", "eager")
_OWN_FILE = "write a model.py that defines build_model and example_inputs (mpress-plan --help)"
_HASH = re.compile(r"[0-9a-f]{12,}")


def is_configuration(path: str) -> bool:
    """Whether a path names a .json file that is not a graph file of ours."""
    return path.endswith(".json") and not is_graph_file(path)


def open_configuration(path: str, overrides: Mapping[str, str], sequence: int) -> ModelFile:
    """The training step of a configuration.  overrides: --model-arg, top-level keys; sequence: --seq-len, 0 for the default.

    Raises InputError for a file that is no usable configuration, a missing library and a class whose training inputs are not known.
    """
    place = Path(path).resolve()
    written = _read(place)
    for key, value in written.items():
        if key.endswith("quantization_config") and value:
            raise InputError(
                "quantized",
                f"the configuration asks for quantized weights ({key}), which are not trained in full",
                place.name,
                f"remove '{key}' from the file to plan the training of the model in --precision",
            )
    with quiet():
        library = _library(place.name)
        config_class = _config_class(library, written, place.name)
        _refuse_code(written, config_class, place.name)
        config, assumptions = _configure(config_class, written, overrides, place.name)
        model_class, task, why = _model_class(library, config, written, place.name)
    sizes = plan_inputs(task, model_class, config, sequence, place.name)

    def factory() -> Any:
        own = copy.deepcopy(config)  # a loss may write into the configuration
        with quiet():
            try:
                return model_class(own)
            except Exception as error:
                raise _rejected(f"{model_class.__name__} cannot be built from it", error, place.name) from None

    def inputs(batch: int) -> dict[str, Any]:
        return make_inputs(sizes, batch)

    return ModelFile(
        name=_name(place, str(config.model_type)),
        file=place.name,
        folder=place.parent,
        factory_name=model_class.__name__,
        factory=factory,
        inputs=inputs,
        loss=lambda out: out.loss,
        arguments={},
        freezes_idle=True,  # the user cannot write into the library's classes
        assumptions=(f"the model is {model_class.__name__} of transformers {library.__version__}{why}", *assumptions, *sizes.assumptions),
    )


def _name(place: Path, model_type: str) -> str:
    """Of the emitted files: the file's stem, and for a config.json its folder, unless that is a snapshot's hash."""
    if place.stem != "config":
        return place.stem
    return model_type if not place.parent.name or _HASH.fullmatch(place.parent.name) else place.parent.name


def _read(place: Path) -> dict[str, Any]:
    hint = "give a transformers config.json (it has model_type or architectures), or a graph file of mpress-plan trace"
    try:
        found = json.loads(place.read_text(encoding="utf-8"))
    except OSError as error:
        raise InputError("config", f"cannot read the configuration: {error.strerror}", place.name, "check the path") from None
    except ValueError as error:
        raise InputError("config", f"the file is not JSON: {error}", place.name, hint) from None
    if not isinstance(found, dict) or not ("model_type" in found or "architectures" in found):
        raise InputError("config", "the file is neither a transformers configuration nor a graph file", place.name, hint)
    return found


def _library(file: str) -> Any:
    try:
        import transformers
    except ImportError as error:
        missing = error.name in ("transformers", None)
        message = "a transformers configuration needs the transformers library" + ("" if missing else f", which does not load: {error}")
        raise InputError("transformers", message, file, "pip install 'mpress-plan[hf]'") from None
    version = tuple(int(part) for part in re.findall(r"\d+", transformers.__version__)[:2])
    if not (5, 24) <= version < (6, 0):
        message = f"transformers {transformers.__version__} is installed, this version works with 5.24 and later 5.x"
        raise InputError("transformers", message, file, "pip install 'mpress-plan[hf]'")
    return transformers


def _config_class(library: Any, written: dict[str, Any], file: str) -> Any:
    known = importlib.import_module("transformers.models.auto.configuration_auto").CONFIG_MAPPING
    kind = written.get("model_type")
    if isinstance(kind, str) and kind in known:
        return known[kind]
    if kind is None:
        for name in _architectures(written):
            config_class = getattr(getattr(library, name, None), "config_class", None)
            if config_class is not None:
                return config_class
        message = f"transformers {library.__version__} has none of the architectures {', '.join(_architectures(written)) or '(none named)'}"
    else:
        message = f"transformers {library.__version__} has no model type {kind!r}"
    raise InputError("config", message, file, f"upgrade transformers if a newer one has it; else {_OWN_FILE}")


def _refuse_code(written: dict[str, Any], config_class: Any, file: str) -> None:
    if written.get("auto_map"):
        names = sorted(str(value) for value in written["auto_map"].values()) if isinstance(written["auto_map"], dict) else []
        own = f"if transformers' own '{config_class.model_type}' is the same model, remove auto_map from the file; else "
        raise InputError(
            "remote-code",
            f"the configuration wants code of its repository ({', '.join(names) or 'auto_map'}), which is never executed",
            file,
            own + "install that code yourself and " + _OWN_FILE,
        )


def _configure(config_class: Any, written: dict[str, Any], overrides: Mapping[str, str], file: str) -> tuple[Any, tuple[str, ...]]:
    """The configuration object for training, and what it departs from the file in."""
    values = copy.deepcopy(written)
    for key, text in overrides.items():
        name = config_class.attribute_map.get(key, key)
        if name not in getattr(config_class, "__dataclass_fields__", {}) and key not in values:
            hint = f"name a key of {config_class.__name__}, such as those in the file"
            raise InputError("model-arg", f"the configuration has no '{key}'", file, hint)
        values.pop(key, None)
        values[name] = parse_value(text)
    said = []
    asked = values.pop("_attn_implementation", None) or values.pop("attn_implementation", None)
    if asked in _TRACED_ATTENTION:
        values["attn_implementation"] = asked
    elif asked is not None:
        said.append(f"attention '{asked}' is planned as torch's own kernels (sdpa)")
        values.pop("attn_implementation", None)
    try:
        config = config_class.from_dict(values)
    except Exception as error:
        raise _rejected("transformers rejects its values", error, file) from None
    cached = [part for part in _parts(config) if getattr(part, "use_cache", False)]
    for part in cached:
        part.use_cache = False
    if cached:
        said.append("the key-value cache is off (use_cache=False)")
    for key, value in _random_depth(config):
        raise InputError(
            "hidden-draw",
            f"{key} = {value}: whole layers are skipped or inputs are masked by chance, so every step is another one",
            file,
            f"set {key} to 0 (or false) in the file or by --model-arg",
        )
    if getattr(config, "is_encoder_decoder", False) and getattr(config, "decoder_start_token_id", None) is None:
        pad = getattr(config, "pad_token_id", None)
        config.decoder_start_token_id = config.pad_token_id = 0 if pad is None else pad
        said.append(f"decoder inputs start with token {config.decoder_start_token_id}, as decoder_start_token_id is not set")
    return config, tuple(said)


def _parts(config: Any) -> Iterable[Any]:
    """A configuration and those inside it."""
    yield config
    for name in getattr(config, "sub_configs", {}):
        part = getattr(config, name, None)
        if part is not None and part is not config:
            yield from _parts(part)


def _random_depth(config: Any) -> Iterable[tuple[str, Any]]:
    """Settings that draw from the generators of numpy, or branch on a random number."""
    for part in _parts(config):
        for key, value in sorted(vars(part).items()):
            if key.endswith("layerdrop") and isinstance(value, float | int) and value > 0:
                yield key, value
        if getattr(part, "apply_spec_augment", False) and any(getattr(part, f"mask_{axis}_prob", 0) > 0 for axis in ("time", "feature")):
            yield "apply_spec_augment", True


def _model_class(library: Any, config: Any, written: dict[str, Any], file: str) -> tuple[Any, Task, str]:
    """The class, what it is trained for, and in words why not the one the file names."""
    auto = importlib.import_module("transformers.models.auto.modeling_auto")
    tables = [(task, getattr(auto, name)) for task, name in _MAPPINGS]
    why = ""
    for name in _architectures(written)[:1]:
        model_class = getattr(library, name, None)
        if model_class is None:
            hint = f"if it is an old name, remove 'architectures' from the file and model_type decides; else {_OWN_FILE}"
            raise InputError("config", f"transformers {library.__version__} has no class {name}", file, hint)
        for task, table in tables:
            if name in _flat(table.values()) and has_loss(task, model_class):
                return model_class, task, ""
        if has_loss(None, model_class):
            raise InputError("config-task", f"the training inputs of {name} are not known", file, _OWN_FILE)
        why = f", as {name} has no loss"
    for task, table in tables:
        for name in _flat([table.get(config.model_type, ())]):
            model_class = getattr(library, name, None)
            if model_class is not None and has_loss(task, model_class):
                return model_class, task, why
    message = f"no class of transformers {library.__version__} trains a '{config.model_type}' on inputs that are known"
    raise InputError("config-task", message, file, _OWN_FILE)


def _flat(entries: Iterable[Any]) -> list[str]:
    return [name for entry in entries for name in ((entry,) if isinstance(entry, str) else entry)]


def _architectures(written: dict[str, Any]) -> list[str]:
    found = written.get("architectures") or []
    return [name for name in found if isinstance(name, str)] if isinstance(found, list) else []


def _rejected(what: str, error: Exception, file: str) -> InputError:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return InputError("config", f"{what}: {type(error).__name__}: {' '.join(lines)[:400]}", file, "correct the value in the file")
