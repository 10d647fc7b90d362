"""What a transformers model is trained on: names, shapes and made-up values, by task.

No attention mask is passed: a batch without padding is planned, which is what lets attention use its fastest kernel.
"""

from __future__ import annotations

import inspect
import sys
from dataclasses import dataclass
from enum import Enum
from typing import Any

import torch

from mpress.errors import InputError

DEFAULT_SEQUENCE = 1024
_OFFSET_POSITIONS = ("create_position_ids_from_input_ids",)


class Task(Enum):
    """What a class is trained for."""

    CAUSAL = "the next token"
    MASKED = "masked tokens"
    SEQ2SEQ = "text from text"
    VISION_LANGUAGE = "the next token, after images"
    IMAGE_CLASSES = "the class of an image"
    SPEECH_TO_TEXT = "text from speech"
    SPEECH_CTC = "text from a waveform"
    CONTRASTIVE = "images against texts"
    SEQUENCE_CLASSES = "the class of a text"
    TOKEN_CLASSES = "the class of a token"


@dataclass(frozen=True, slots=True)
class Field:
    """One keyword of the forward.  low <= value < high for integers; without range normal floats, without shape the constant itself.

    lead: a value that the first `count` positions of a row hold instead.
    """

    name: str
    shape: tuple[int, ...] = ()
    low: int = 0
    high: int = 0
    lead: int = 0
    count: int = 0
    constant: bool | None = None


@dataclass(frozen=True, slots=True)
class Sizes:
    """All keywords of the forward for one sample; shapes lack the batch."""

    fields: tuple[Field, ...]
    assumptions: tuple[str, ...]


def has_loss(task: Task | None, model_class: Any) -> bool:
    """Whether the forward computes a loss itself (for task None: whatever it is trained for)."""
    names = inspect.signature(model_class.forward).parameters
    if task is Task.CONTRASTIVE:
        return "return_loss" in names
    return "labels" in names or (task is None and "return_loss" in names)


def make_inputs(sizes: Sizes, batch: int) -> dict[str, Any]:
    """Random keywords of one micro-batch, from torch's generator."""
    made: dict[str, Any] = {}
    for field in sizes.fields:
        if field.constant is not None:
            made[field.name] = field.constant
        elif field.high > field.low:
            values = torch.randint(field.low, field.high, (batch, *field.shape))
            if field.count:
                values[:, : field.count] = field.lead
            made[field.name] = values
        else:
            made[field.name] = torch.randn(batch, *field.shape)
    return made


def plan_inputs(task: Task, model_class: Any, config: Any, sequence: int, file: str) -> Sizes:
    """The inputs of a task.  sequence: --seq-len, 0 for the smaller of the model's positions and 1024 (a waveform: 10 seconds).

    Raises InputError("seq-len") for a length the model has no positions for, InputError("config-task") for inputs that cannot be derived.
    """
    text = config.get_text_config(decoder=True)
    words = f"trained for {task.value}, on made-up data"
    if task is Task.IMAGE_CLASSES:
        if sequence:
            raise InputError("seq-len", f"{model_class.__name__} reads images, not sequences", "--seq-len", "drop --seq-len")
        return Sizes(
            (_pixels(getattr(config, "vision_config", config), model_class, file), Field("labels", (), 0, _labels(config))), (words,)
        )
    if task is Task.SPEECH_CTC:
        return _waveform(config, sequence or 160_000, words)
    vocabulary = text.vocab_size
    if task is Task.SPEECH_TO_TEXT:
        bins, frames = getattr(config, "num_mel_bins", 0), 2 * getattr(config, "max_source_positions", 0)
        if "input_features" not in inspect.signature(model_class.forward).parameters or not bins or not frames:
            raise _unknown(model_class, file)
        length = _length(sequence, getattr(config, "max_target_positions", 0), file)
        fields = (Field("input_features", (bins, frames)), Field("labels", (length,), 0, vocabulary))
        return Sizes(fields, (words, f"{frames} frames of speech, {length} tokens of text"))
    length = _length(sequence, _positions(text, model_class), file)
    tokens = Field("input_ids", (length,), 0, vocabulary)
    labels = Field("labels", (length,), 0, vocabulary)
    padding = f"sequences of {length} tokens without padding: no attention_mask is passed"
    if task is Task.SEQ2SEQ:
        return Sizes((tokens, labels), (words, f"source and target {padding}"))
    if task is Task.VISION_LANGUAGE:
        return _images_in_text(config, model_class, length, words, padding, file)
    if task is Task.CONTRASTIVE:
        pixels = _pixels(config.vision_config, model_class, file)
        return Sizes((tokens, pixels, Field("return_loss", constant=True)), (words, padding))
    if task is Task.SEQUENCE_CLASSES:
        labels = Field("labels", (), 0, _labels(config))
    elif task is Task.TOKEN_CLASSES:
        labels = Field("labels", (length,), 0, _labels(config))
    return Sizes((tokens, labels), (words, padding))


def _length(sequence: int, limit: int, file: str) -> int:
    """The sequence length; limit 0: the model does not bound it."""
    if sequence < 0 or (limit and sequence > limit):
        message = f"--seq-len is {sequence}, the model has {limit} positions" if limit else f"--seq-len is {sequence}"
        raise InputError(
            "seq-len", message, file, f"give 1 to {limit}, or raise the positions in the configuration" if limit else "1 or more"
        )
    return sequence or min(limit or DEFAULT_SEQUENCE, DEFAULT_SEQUENCE)


def _positions(text: Any, model_class: Any) -> int:
    """How many tokens the model has positions for, 0 if it does not say."""
    limit = getattr(text, "max_position_embeddings", 0) or 0
    module = vars(sys.modules[model_class.__module__])
    if limit and any(name in module or any(hasattr(item, name) for item in module.values()) for name in _OFFSET_POSITIONS):
        limit -= (getattr(text, "pad_token_id", None) or 0) + 1  # positions are counted from behind the padding token's
    return int(limit)


def _labels(config: Any) -> int:
    return max(int(config.num_labels), 2)


def _pixels(config: Any, model_class: Any, file: str) -> Field:
    size, channels = getattr(config, "image_size", None), getattr(config, "num_channels", 3)
    if not size:
        raise _unknown(model_class, file)
    height, width = (size, size) if isinstance(size, int) else (size[0], size[1])
    return Field("pixel_values", (channels, height, width))


def _images_in_text(config: Any, model_class: Any, length: int, words: str, padding: str, file: str) -> Sizes:
    """One image a sample, its tokens first: the shape Llava is trained in."""
    vision, image = getattr(config, "vision_config", None), getattr(config, "image_token_id", None)
    strategy = getattr(config, "vision_feature_select_strategy", None)
    if vision is None or image is None or strategy is None or hasattr(config, "image_grid_pinpoints"):
        raise _unknown(model_class, file)
    pixels = _pixels(vision, model_class, file)
    patches = (pixels.shape[1] // vision.patch_size) * (pixels.shape[2] // vision.patch_size) + (strategy == "full")
    if length <= patches:
        message = f"an image takes {patches} of the {length} tokens of a sequence, which leaves none for text"
        raise InputError("seq-len", message, file, f"give --seq-len {patches + 1} or more")
    vocabulary = config.get_text_config(decoder=True).vocab_size
    # ordinary tokens must not read as image tokens: the ids below or above the image's, whichever are more
    low, high = (0, image) if image > vocabulary // 2 else (image + 1, vocabulary)
    fields = (
        Field("input_ids", (length,), low, high, lead=image, count=patches),
        pixels,
        Field("labels", (length,), low, high),
    )
    return Sizes(fields, (words, padding, f"one image a sample, {patches} image tokens before {length - patches} tokens of text"))


def _waveform(config: Any, samples: int, words: str) -> Sizes:
    frames = samples
    for kernel, stride in zip(getattr(config, "conv_kernel", ()), getattr(config, "conv_stride", ()), strict=True):
        frames = (frames - kernel) // stride + 1
    length = max(frames // 4, 1)
    fields = (Field("input_values", (samples,)), Field("labels", (length,), 1, config.vocab_size))
    return Sizes(fields, (words, f"waveforms of {samples} samples without padding, {length} tokens of text"))


def _unknown(model_class: Any, file: str) -> InputError:
    hint = "write a model.py that defines build_model and example_inputs (mpress-plan --help)"
    return InputError("config-task", f"the training inputs of {model_class.__name__} are not known", file, hint)
