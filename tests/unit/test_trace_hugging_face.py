"""A transformers configuration becomes a training step: the right class, sensible inputs, nothing downloaded, refusals with a way out."""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from hf_configs import CONFIGS, write_config
from mpress.errors import InputError
from mpress.trace.as_eager import as_eager, no_hidden_draws, quiet
from mpress.trace.hugging_face import is_configuration, open_configuration
from mpress.trace.model_file import build, example_inputs
from mpress.trace.record import open_model, trace

ROOT = Path(__file__).resolve().parents[2]
CLASSES = {  # the class and its keywords: shape of two samples; the sizes are those of hf_configs
    "gpt2": ("GPT2LMHeadModel", {"input_ids": (2, 16), "labels": (2, 16)}),
    "llama": ("LlamaForCausalLM", {"input_ids": (2, 16), "labels": (2, 16)}),
    "bert": ("BertForMaskedLM", {"input_ids": (2, 16), "labels": (2, 16)}),
    "roberta": ("RobertaForMaskedLM", {"input_ids": (2, 16), "labels": (2, 16)}),  # 18 positions, two of them are the padding's
    "t5": ("T5ForConditionalGeneration", {"input_ids": (2, 1024), "labels": (2, 1024)}),  # relative positions: no bound of its own
    "vit": ("ViTForImageClassification", {"pixel_values": (2, 3, 16, 16), "labels": (2,)}),
    "whisper": ("WhisperForConditionalGeneration", {"input_features": (2, 8, 24), "labels": (2, 16)}),
    "llava": ("LlavaForConditionalGeneration", {"input_ids": (2, 24), "pixel_values": (2, 3, 16, 16), "labels": (2, 24)}),
    "clip": ("CLIPModel", {"input_ids": (2, 16), "pixel_values": (2, 3, 16, 16)}),
    # 160,000 samples through kernels 10 and 3 with strides 5 and 2: 31,999 and 15,999 frames
    "wav2vec2": ("Wav2Vec2ForCTC", {"input_values": (2, 160_000), "labels": (2, 3999)}),
}


def refused(path: str, overrides: dict[str, str] | None = None, sequence: int = 0) -> InputError:
    with pytest.raises(InputError) as caught:
        open_configuration(path, overrides or {}, sequence)
    return caught.value


@pytest.mark.parametrize("family", list(CLASSES))
@pytest.mark.parametrize("named", [True, False])
def test_the_class_and_what_it_is_trained_on(tmp_path: Path, family: str, named: bool) -> None:
    name, shapes = CLASSES[family]
    changes: dict[str, Any] = {} if named else {"architectures": None}
    model = open_configuration(write_config(tmp_path, family, **changes), {}, 0)
    module = build(model)
    assert type(module).__name__ == name
    assert module.training
    assert {key for key, p in module.named_parameters() if not p.is_meta} <= {"wav2vec2.masked_spec_embed"}  # made by torch.Tensor(n)
    positional, given = example_inputs(model, 2)
    assert positional == ()
    assert {key: tuple(value.shape) for key, value in given.items() if isinstance(value, torch.Tensor)} == shapes
    assert "attention_mask" not in given


def test_values_are_tokens_and_classes(tmp_path: Path) -> None:
    _, given = example_inputs(open_configuration(write_config(tmp_path, "gpt2", n_positions=512), {}, 0), 8)
    for key in ("input_ids", "labels"):
        assert given[key].dtype == torch.int64
        assert int(given[key].min()) == 0 and int(given[key].max()) == 63
    _, given = example_inputs(open_configuration(write_config(tmp_path, "vit"), {}, 0), 64)
    assert sorted(set(given["labels"].tolist())) == [0, 1, 2, 3]
    assert given["pixel_values"].dtype == torch.float32


def test_an_image_takes_its_tokens_and_no_others(tmp_path: Path) -> None:
    _, given = example_inputs(open_configuration(write_config(tmp_path, "llava"), {}, 0), 4)
    image = given["input_ids"] == 63
    assert image[:, :16].all() and not image[:, 16:].any()  # 4 x 4 patches
    full = open_configuration(write_config(tmp_path, "llava", vision_feature_select_strategy="full"), {}, 0)
    assert int((example_inputs(full, 1)[1]["input_ids"] == 63).sum()) == 17  # and the class token


def test_the_configuration_is_set_for_training(tmp_path: Path) -> None:
    module: Any = build(open_configuration(write_config(tmp_path, "llama"), {}, 0))
    assert module.config.use_cache is False and module.config._attn_implementation == "sdpa"
    module = build(open_configuration(write_config(tmp_path, "llava"), {}, 0))
    assert module.config.text_config.use_cache is False
    model = open_configuration(write_config(tmp_path, "llama", attn_implementation="eager"), {}, 0)
    module = build(model)
    assert module.config._attn_implementation == "eager" and not any("kernels" in a for a in model.assumptions)
    model = open_configuration(write_config(tmp_path, "llama", _attn_implementation="flash_attention_2"), {}, 0)
    module = build(model)
    assert module.config._attn_implementation == "sdpa"
    assert "attention 'flash_attention_2' is planned as torch's own kernels (sdpa)" in model.assumptions


def test_decoders_get_a_start_token(tmp_path: Path) -> None:
    model = open_configuration(write_config(tmp_path, "t5", decoder_start_token_id=None), {}, 8)
    module: Any = build(model)
    assert module.config.decoder_start_token_id == module.config.pad_token_id == 0
    assert "decoder inputs start with token 0, as decoder_start_token_id is not set" in model.assumptions


def test_lengths(tmp_path: Path) -> None:
    def length(family: str, sequence: int, **changes: Any) -> int:
        given = example_inputs(open_configuration(write_config(tmp_path, family, **changes), {}, sequence), 1)[1]
        return int(given["labels"].shape[1])

    assert length("gpt2", 5) == 5
    assert length("llama", 0, max_position_embeddings=4096) == 1024
    assert length("llama", 4096, max_position_embeddings=4096) == 4096
    assert length("t5", 3000) == 3000
    error = refused(write_config(tmp_path, "gpt2"), sequence=17)
    assert error.code == "seq-len" and "16 positions" in error.message and "1 to 16" in error.hint
    assert refused(write_config(tmp_path, "roberta"), sequence=17).code == "seq-len"
    assert refused(write_config(tmp_path, "gpt2"), sequence=-1).code == "seq-len"
    assert refused(write_config(tmp_path, "vit"), sequence=4).code == "seq-len"
    assert "--seq-len 17" in refused(write_config(tmp_path, "llava"), sequence=16).hint
    with pytest.raises(InputError) as caught:
        open_model(str(ROOT / "examples" / "gpt.py"), {}, 8)
    assert caught.value.code == "seq-len" and "--model-arg" in caught.value.hint


def test_overrides_change_the_configuration(tmp_path: Path) -> None:
    module: Any = build(open_configuration(write_config(tmp_path, "gpt2"), {"n_layer": "2", "resid_pdrop": "0.0"}, 0))
    assert len(module.transformer.h) == 2 and module.config.resid_pdrop == 0.0
    module = build(open_configuration(write_config(tmp_path, "gpt2"), {"num_hidden_layers": "3"}, 0))
    assert len(module.transformer.h) == 3  # the other name of n_layer
    error = refused(write_config(tmp_path, "gpt2"), {"layers": "2"})
    assert error.code == "model-arg" and "'layers'" in error.message


def test_names(tmp_path: Path) -> None:
    folder = tmp_path / "tiny-gpt"
    folder.mkdir()
    assert open_configuration(write_config(folder, "gpt2"), {}, 0).name == "tiny-gpt"
    assert open_configuration(write_config(folder, "gpt2", "small.json"), {}, 0).name == "small"
    snapshot = tmp_path / "5fbb1b6d2f1c4d2f8b0d6b4c4b2b8d2f4a6c8e0f"
    snapshot.mkdir()
    assert open_configuration(write_config(snapshot, "gpt2"), {}, 0).name == "gpt2"


def test_what_is_a_configuration(tmp_path: Path) -> None:
    (tmp_path / "graph.json").write_text('{"format": "mpress-graph", "version": 1}')
    assert is_configuration(write_config(tmp_path, "gpt2"))
    assert not is_configuration(str(tmp_path / "graph.json"))
    assert not is_configuration(str(ROOT / "examples" / "gpt.py"))


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("{", "not JSON"),
        ("[1]", "neither"),
        ('{"hidden_size": 3}', "neither"),
        ('{"model_type": "gpt5"}', "no model type 'gpt5'"),
        ('{"architectures": ["GPT5"]}', "none of the architectures GPT5"),
        ('{"model_type": "gpt2", "architectures": ["GPT5"]}', "no class GPT5"),
        ('{"model_type": "gpt2", "n_layer": "many"}', "n_layer"),
        ('{"model_type": "gpt2", "n_embd": 30, "n_head": 4}', "GPT2LMHeadModel cannot be built"),
    ],
)
def test_what_is_no_configuration_is_refused(tmp_path: Path, text: str, words: str) -> None:
    path = tmp_path / "config.json"
    path.write_text(text)
    with pytest.raises(InputError) as caught:
        build(open_configuration(str(path), {}, 0))
    assert caught.value.code == "config" and words in caught.value.message and caught.value.hint
    assert caught.value.where == "config.json"


def test_a_missing_file_is_refused(tmp_path: Path) -> None:
    assert refused(str(tmp_path / "config.json")).code == "config"


def test_what_cannot_be_planned_is_refused(tmp_path: Path) -> None:
    error = refused(write_config(tmp_path, "llama", quantization_config={"quant_method": "gptq", "bits": 4}))
    assert error.code == "quantized" and "quantization_config" in error.hint
    error = refused(write_config(tmp_path, "llama", auto_map={"AutoModelForCausalLM": "modeling_own.OwnModel"}))
    assert error.code == "remote-code" and "modeling_own.OwnModel" in error.message and "'llama'" in error.hint
    error = refused(write_config(tmp_path, "wav2vec2", layerdrop=0.1))
    assert error.code == "hidden-draw" and "layerdrop" in error.hint
    error = refused(write_config(tmp_path, "wav2vec2", apply_spec_augment=True))
    assert error.code == "hidden-draw" and "apply_spec_augment" in error.hint
    error = refused(write_config(tmp_path, "bert", architectures=["BertForNextSentencePrediction"]))
    assert error.code == "config-task" and "model.py" in error.hint
    (tmp_path / "config.json").write_text('{"model_type": "encodec"}')
    assert refused(str(tmp_path / "config.json")).code == "config-task"


def test_layer_drop_can_be_switched_off_by_an_argument(tmp_path: Path) -> None:
    path = write_config(tmp_path, "wav2vec2", layerdrop=0.1, apply_spec_augment=True)
    open_configuration(path, {"layerdrop": "0", "apply_spec_augment": "false"}, 0)


def test_a_loss_whose_operators_read_lengths_is_refused_at_its_line(tmp_path: Path) -> None:
    """CTC allocates by the longest target, which only values tell."""
    with pytest.raises(InputError) as caught:
        trace(write_config(tmp_path, "wav2vec2"), model_args={}, micro_batch=2, precision="fp32", sequence=640)
    assert caught.value.code == "data-dependent" and caught.value.where.startswith("loss_ctc.py:")


def test_a_class_without_a_loss_gives_way_to_one_that_has_it(tmp_path: Path) -> None:
    model = open_configuration(write_config(tmp_path, "llama", architectures=["LlamaModel"]), {}, 0)
    assert type(build(model)).__name__ == "LlamaForCausalLM"
    assert model.assumptions[0].startswith("the model is LlamaForCausalLM") and model.assumptions[0].endswith("LlamaModel has no loss")


def test_without_the_library(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "transformers", None)
    error = refused(write_config(tmp_path, "gpt2"))
    assert error.code == "transformers" and error.hint == "pip install 'mpress-plan[hf]'"


def test_with_another_version(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import transformers

    for version in ("4.57.1", "6.0.0"):
        monkeypatch.setattr(transformers, "__version__", version)
        error = refused(write_config(tmp_path, "gpt2"))
        assert error.code == "transformers" and version in error.message


def test_silent_offline_and_as_before(tmp_path: Path) -> None:
    """In a process of its own: the first import is inside.  No socket, no word, no trace left in the environment."""
    path = write_config(tmp_path, "vit", bos_token_id=999, decoder_start_token_id=-5)
    code = f"""
import os, socket, sys
before = dict(os.environ)
def connect(*args): raise SystemExit("a connection was tried")
socket.socket.connect = socket.create_connection = socket.getaddrinfo = connect
from mpress.trace.record import trace
graph = trace({path!r}, model_args={{}}, micro_batch=1, precision="fp32")
import huggingface_hub.constants, transformers.utils.import_utils as u, torch
from torch._subclasses.fake_tensor import FakeTensorMode
assert dict(os.environ) == before and not huggingface_hub.constants.HF_HUB_OFFLINE
with FakeTensorMode(): assert u.is_fake_tensor(torch.ones(1))
print(len(graph.parameters))
"""
    environment = {key: value for key, value in os.environ.items() if not key.startswith(("HF_", "TRANSFORMERS_"))}
    paths = [str(ROOT / folder) for folder in ("planner", "cli", "profiles")]
    environment["PYTHONPATH"] = os.pathsep.join([*paths, environment.get("PYTHONPATH", "")])
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=False, env=environment)
    assert done.returncode == 0, done.stderr
    assert done.stderr == "" and int(done.stdout) > 20


def test_contexts_restore_what_they_found(monkeypatch: pytest.MonkeyPatch) -> None:
    import huggingface_hub.constants as hub
    from transformers.utils import import_utils

    monkeypatch.setenv("HF_HUB_OFFLINE", "0")
    monkeypatch.setattr(hub, "HF_HUB_OFFLINE", False)
    original = import_utils.is_fake_tensor
    with pytest.raises(RuntimeError), as_eager():
        assert hub.is_offline_mode() and os.environ["HF_HUB_OFFLINE"] == "1"
        assert import_utils.is_fake_tensor is not original
        raise RuntimeError
    assert not hub.is_offline_mode() and os.environ["HF_HUB_OFFLINE"] == "0"
    assert import_utils.is_fake_tensor is original
    with quiet():
        pass
    assert "TRANSFORMERS_VERBOSITY" not in os.environ


@pytest.mark.parametrize("draw", ["random.random()", "numpy.random.rand()"])
def test_draws_that_a_trace_cannot_see_are_refused(tmp_path: Path, draw: str) -> None:
    path = tmp_path / "net.py"
    path.write_text(
        "import random, numpy, torch\nfrom torch import nn\n"
        "class Net(nn.Module):\n"
        "    def __init__(self):\n"
        "        super().__init__()\n"
        "        self.one, self.two = nn.Linear(4, 4), nn.Linear(4, 4)\n"
        "    def forward(self, x):\n"
        "        x = self.one(x)\n"
        f"        return (self.two(x) if {draw} < 2 else x).sum()\n"
        "def build_model(): return Net()\n"
        "def example_inputs(batch=1): return (torch.ones(batch, 4),)\n"
    )
    with pytest.raises(InputError) as caught:
        trace(str(path), model_args={}, micro_batch=1, precision="fp32")
    assert caught.value.code == "hidden-draw" and draw.rpartition(".")[0] in caught.value.message.replace("Python's random", "random")


def test_what_draws_nothing_passes() -> None:
    random.seed(3)
    with no_hidden_draws("net.py"):
        torch.rand(3)


def test_configurations_are_as_small_as_they_say() -> None:
    assert all(len(json.dumps(config)) < 800 for config in CONFIGS.values())
