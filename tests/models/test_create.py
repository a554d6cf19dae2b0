"""Models are created from specs and callables; specs that cannot be created are refused with a fix."""

import json
import subprocess
import sys

import pytest
import torch
from torch import nn

import tightfit
from tightfit.errors import InputError
from tightfit.job import ModelSpec
from tightfit.models import load_python, model_config, model_factory, task_of, vocabulary_size

SMALL = {"hidden_size": 16, "num_attention_heads": 2, "num_hidden_layers": 2, "intermediate_size": 32, "vocab_size": 50}
LLAMA = ModelSpec(architecture="llama", config={**SMALL, "num_key_value_heads": 1})
GPT2 = ModelSpec(architecture="gpt2", config={"n_embd": 16, "n_head": 2, "n_layer": 2, "vocab_size": 50})
BERT = ModelSpec(architecture="bert", config=SMALL)
VIT = ModelSpec(
    architecture="vit",
    config={
        "hidden_size": 16,
        "num_attention_heads": 2,
        "num_hidden_layers": 2,
        "intermediate_size": 32,
        "image_size": 8,
        "patch_size": 4,
        "num_labels": 3,
    },
)
T5 = ModelSpec(
    architecture="t5", config={"d_model": 16, "d_kv": 8, "d_ff": 32, "num_layers": 2, "num_heads": 2, "vocab_size": 50}
)


def refusal(spec: ModelSpec) -> InputError:
    with pytest.raises(InputError) as caught:
        model_factory(spec)()
    return caught.value


def test_importing_the_package_imports_no_torch():
    code = "import sys, tightfit.models; print({'torch', 'transformers'} & set(sys.modules))"
    seen = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert seen.stdout.strip() == "set()"


@pytest.mark.parametrize("spec", [LLAMA, GPT2, BERT], ids=str)
def test_language_models_give_logits_of_every_token(spec):
    model = model_factory(spec)()
    assert {parameter.dtype for parameter in model.parameters()} == {torch.float32}
    assert model.config._attn_implementation == "sdpa"
    output = model(input_ids=torch.tensor([[1, 2, 3]]))
    assert output.logits.shape == (1, 3, 50)
    assert output.get("past_key_values") is None


def test_vit_classifies_images_at_the_size_of_its_config():
    assert model_factory(VIT)()(pixel_values=torch.zeros(2, 3, 8, 8)).logits.shape == (2, 3)


def test_t5_reads_labels_shifted_right_by_its_start_token():
    model = model_factory(T5)()
    assert model.prepare_decoder_input_ids_from_labels(labels=torch.tensor([[7, 8]])).tolist() == [[0, 7]]


def test_gpt2_ties_its_head_to_its_embedding():
    model = model_factory(GPT2)()
    assert model.lm_head.weight is model.transformer.wte.weight


@pytest.mark.parametrize(
    ("spec", "task"),
    [
        (LLAMA, "causal-lm"),
        (BERT, "masked-lm"),
        (T5, "seq2seq-lm"),
        (VIT, "classification"),
        (ModelSpec(preset="qwen3-8b"), "causal-lm"),
        (ModelSpec(architecture="olmo2"), "causal-lm"),
        (ModelSpec(architecture="bert", task="causal-lm"), "causal-lm"),
        (ModelSpec(python="torch.nn:Identity"), None),
        (nn.Identity, None),
    ],
    ids=str,
)
def test_the_task_follows_from_the_model(spec, task):
    assert task_of(spec) == task


@pytest.mark.parametrize(
    ("kind", "config", "task"),
    [
        ("GPT2LMHeadModel", {"n_layer": 1, "n_embd": 8, "n_head": 2}, "causal-lm"),
        ("BertForMaskedLM", {"num_hidden_layers": 1, "hidden_size": 24}, "masked-lm"),
        ("BertForSequenceClassification", {"num_hidden_layers": 1, "hidden_size": 24}, "classification"),
        ("T5ForConditionalGeneration", {"num_layers": 1, "d_model": 8}, "seq2seq-lm"),
        ("WhisperForConditionalGeneration", {"encoder_layers": 1, "decoder_layers": 1, "d_model": 12}, "seq2seq-lm"),
        ("BertModel", {"num_hidden_layers": 1, "hidden_size": 24}, None),
    ],
)
def test_a_function_s_model_has_the_task_of_its_class(kind: str, config: dict[str, int], task: str | None) -> None:
    import transformers

    made = getattr(transformers, kind)
    calls = []

    def create() -> nn.Module:
        calls.append(1)
        return made(made.config_class(**config))

    assert task_of(create) == task
    assert task_of(create) == task
    assert len(calls) == 1
    assert task_of(lambda: nn.Sequential(create())) is None


def test_vocabulary_size_is_known_before_the_model_exists():
    assert vocabulary_size(ModelSpec(preset="llama-3-8b")) == 128256
    assert vocabulary_size(VIT) is None
    assert vocabulary_size(ModelSpec(python="a.py:f")) is None


def test_special_tokens_outside_the_vocabulary_are_dropped():
    assert model_config(ModelSpec(preset="gpt2", config={"vocab_size": 300})).eos_token_id is None
    assert model_config(ModelSpec(preset="gpt2")).eos_token_id == 50256


def test_rotary_keys_of_older_configs_change_a_preset():
    assert model_config(ModelSpec(preset="llama-3-8b", config={"rope_theta": 7.0})).rope_parameters["rope_theta"] == 7.0


def test_a_config_key_that_only_the_model_s_code_reads():
    keys = {"architecture": "qwen3_moe", "config": {"head_dim": 8}}
    assert model_config(ModelSpec(**keys)).head_dim == 8
    with pytest.raises(InputError, match=r"model\.head_dim"):
        model_config(ModelSpec(**{**keys, "architecture": "gpt2"}))


@pytest.mark.parametrize(
    ("spec", "asked", "fix"),
    [
        (ModelSpec(architecture="lama"), "model.architecture=lama", "'llama'"),
        (ModelSpec(preset="gpt-2"), "model.preset=gpt-2", "'gpt2'"),
        (ModelSpec(architecture="llama", config={"hiden_size": 3}), "model.hiden_size", "'hidden_size'"),
        (
            ModelSpec(architecture="llama", config={**SMALL, "num_attention_heads": 3}),
            "num_attention_heads=3",
            "num_attention_heads: 2",
        ),
        (ModelSpec(architecture="gpt2", config={"n_embd": 10, "n_head": 3}), "n_head=3", "n_head: 2"),
        (
            ModelSpec(architecture="llama", config={"num_attention_heads": 4, "num_key_value_heads": 3}),
            "num_key_value_heads=3",
            "num_key_value_heads: 2",
        ),
        (
            ModelSpec(
                architecture="llama", config={"hidden_size": 12, "num_attention_heads": 4, "num_key_value_heads": 4}
            ),
            "num_attention_heads=4",
            "num_attention_heads: 3",
        ),
        (ModelSpec(architecture="bert", config={"vocab_size": 0}), "vocab_size=0", "1 or more"),
        (ModelSpec(architecture="llama", config={"hidden_size": "big"}), "model.hidden_size='big'", "default, 4096"),
        (
            ModelSpec(architecture="llama", config={**SMALL, "num_key_value_heads": 1, "hidden_act": "swoosh"}),
            "model (llama)",
            "config keys",
        ),
        (
            ModelSpec(architecture="llama", task="masked-lm", config=SMALL | {"num_key_value_heads": 1}),
            "model.task=masked-lm",
            "causal-lm",
        ),
    ],
    ids=str,
)
def test_a_spec_that_cannot_be_made_is_refused_with_its_fix(spec, asked, fix):
    error = refusal(spec)
    assert asked in error.asked
    assert fix in error.fix


@pytest.fixture
def pretrained(tmp_path):
    folder = tmp_path / "llama"
    model_factory(LLAMA)().save_pretrained(folder)
    return folder


def test_a_pretrained_folder_gives_its_weights_back(pretrained):
    spec = ModelSpec.parse({"from": str(pretrained)})
    model = model_factory(spec)()
    torch.manual_seed(1)
    again = model_factory(spec, sequential=True)()
    assert task_of(spec) == "causal-lm"
    assert all(map(torch.equal, model.parameters(), again.parameters()))
    assert model(input_ids=torch.tensor([[1]])).get("past_key_values") is None


def test_a_pretrained_folder_on_meta_reads_no_weights(pretrained):
    (pretrained / "model.safetensors").unlink()
    with torch.device("meta"):
        model = model_factory(ModelSpec.parse({"from": str(pretrained)}))()
    assert {parameter.device.type for parameter in model.parameters()} == {"meta"}


def test_folders_without_a_model_are_refused(pretrained):
    near = refusal(ModelSpec.parse({"from": str(pretrained.parent / "lama")}))
    assert near.fix == f"did you mean {pretrained}?"
    (pretrained / "model.safetensors").unlink()
    assert "safetensors" in refusal(ModelSpec.parse({"from": str(pretrained)})).found
    (pretrained / "config.json").write_text("{")
    assert "not JSON" in refusal(ModelSpec.parse({"from": str(pretrained)})).found
    (pretrained / "config.json").unlink()
    assert refusal(ModelSpec.parse({"from": str(pretrained)})).found == "has no config.json"


def test_weights_of_another_shape_are_refused(pretrained):
    content = json.loads((pretrained / "config.json").read_text())
    (pretrained / "config.json").write_text(json.dumps(content | {"intermediate_size": 48}))
    found = refusal(ModelSpec.parse({"from": str(pretrained)})).found
    assert "model.layers.0.mlp.down_proj.weight has [16, 32] there and [16, 48] here" in found
    assert found.endswith("and 3 more")


FILE = """
from torch import nn
from neighbour import WIDTH

def make(width=WIDTH):
    return nn.Linear(width, 2)

def needs(width):
    return nn.Linear(width, 2)

def wrong():
    return "a model"

def breaks():
    return nn.Linear(-1, 2)

model = nn.Linear(1, 1)
number = 3
"""


@pytest.fixture
def file(tmp_path):
    (tmp_path / "neighbour.py").write_text("WIDTH = 5\n")
    (tmp_path / "mine.py").write_text(FILE)
    yield tmp_path / "mine.py"
    sys.modules.pop("neighbour", None)


def test_a_function_of_a_file_makes_the_model(file):
    assert model_factory(ModelSpec(python=f"{file}:make"))().in_features == 5
    assert load_python(f"{file}:make") is load_python(f"{file}:make")


def test_a_function_of_a_package_makes_the_model():
    assert load_python("torch.nn:Identity") is nn.Identity
    assert isinstance(model_factory(ModelSpec(python="torch.nn:Identity"))(), nn.Identity)


@pytest.mark.parametrize(
    ("name", "found", "fix"),
    [
        ("mine.py:mak", "has no function mak", "'make'"),
        ("mine.py:needs", "cannot be called without arguments", "defaults"),
        ("mine.py:wrong", "returned str", "return the model"),
        ("mine.py:breaks", "(line 15 of", "mend"),
        ("mine.py:model", "is a Linear, not a function", "give a function"),
        ("mine.py:number", "is a int, not a function", "def number"),
        ("main.py:make", "there is no file", "mine.py"),
        ("mine.py", "names no function", "file.py:function"),
    ],
)
def test_python_that_gives_no_model_is_refused_with_its_fix(file, name, found, fix):
    error = refusal(ModelSpec(python=str(file.parent / name)))
    assert found in error.found
    assert fix in error.fix


def test_a_file_that_does_not_run_is_refused_with_its_line(tmp_path):
    (tmp_path / "broken.py").write_text("x = 1\nraise KeyError('no such thing')\n")
    for _ in range(2):  # a failed file is not taken for a loaded one
        error = refusal(ModelSpec(python=f"{tmp_path}/broken.py:make"))
        assert "KeyError" in error.found
        assert "(line 2 of" in error.found


def test_a_missing_module_is_refused():
    assert refusal(ModelSpec(python="no_such.module:make")).found == "there is no module no_such"


def test_running_out_of_memory_is_not_blamed_on_the_spec():
    def make() -> nn.Module:
        raise torch.OutOfMemoryError("out of memory")

    with pytest.raises(torch.OutOfMemoryError):
        model_factory(make)()


@pytest.mark.parametrize("architecture", ["m2m_100", "blenderbot", "blenderbot-small"])
def test_a_decoder_reads_labels_shifted_as_by_the_model(architecture: str) -> None:
    """For models without a method of their own: the loss equals the one that the model computes
    from labels."""
    config = {
        "d_model": 16,
        "encoder_ffn_dim": 16,
        "decoder_ffn_dim": 16,
        "vocab_size": 40,
        "max_position_embeddings": 32,
    }
    layers = {f"{side}_{what}": 2 for side in ("encoder", "decoder") for what in ("layers", "attention_heads")}
    quiet = {
        "dropout": 0.0,
        "encoder_layerdrop": 0.0,
        "decoder_layerdrop": 0.0,
        "attention_dropout": 0.0,
        "activation_dropout": 0.0,
    }
    model = {"architecture": architecture, **config, **layers, **quiet, "decoder_start_token_id": 2, "pad_token_id": 1}
    labels = torch.tensor([5, 6, 7, -100])
    job = tightfit.Job(
        model=model,
        data=[{"input_ids": torch.arange(4, 9), "labels": labels}] * 4,
        train=tightfit.Train(batch=2, steps=1),
    )
    run = tightfit.build(job)
    (batch,) = next(run.data.steps(0, None))
    assert run.loss_sum(batch).item() == pytest.approx(run.model(**batch).loss.item() * 6, rel=1e-5)


def test_a_function_may_create_layers_without_values_first() -> None:
    """nn.utils.skip_init makes the layer on the meta device and moves it, also where the planner makes the model."""

    def made() -> nn.Module:
        layer = nn.utils.skip_init(nn.Linear, 4, 3, bias=False)
        nn.init.ones_(layer.weight)
        return layer

    job = tightfit.Job(
        model=made, data=[(torch.ones(4), torch.ones(3))] * 8, loss=nn.MSELoss(), train={"batch": 4, "steps": 1}
    )
    assert tightfit.dry_run(job, tightfit.Plan()).rows["parameters"] == 48
    run = tightfit.build(job)
    assert [step.loss for step in tightfit.train(run)] == [9.0]


OWN_FILE = """
import torch
from torch import nn

ROWS = [(torch.ones(4), torch.full((3,), float(row))) for row in range(8)]


def model():
    return nn.Linear(4, 3)


def data():
    return ROWS
"""


def test_tensors_of_a_user_s_file_have_values(tmp_path):
    """The planner reads the file where tensors have no values."""
    path = tmp_path / "own_rows.py"
    path.write_text(OWN_FILE)
    job = tightfit.Job(
        model={"python": f"{path}:model"},
        data={"python": f"{path}:data"},
        loss=nn.MSELoss(),
        train={"batch": 4, "steps": 2, "trackers": []},
    )
    assert tightfit.dry_run(job, tightfit.Plan()).total > 0
    assert load_python(f"{path}:data")()[3][1].tolist() == [3.0] * 3
    assert len([step.loss for step in tightfit.train(tightfit.build(job))]) == 2
