"""What belongs to a model is copied; what else lies in its directory is named, and stays there."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from conftest import change_json, tree
from openquant import SourceError, UsageError, compress, dequantize, verify
from openquant.files.checkpoint import open_checkpoint
from support import small_checkpoints

PRIVATE = (
    *(".env", ".netrc", ".bash_history", ".ssh/id_rsa", "id_rsa", "credentials.json", "secrets.yaml", "service.pem"),
    *("train.jsonl", "data/part-0.parquet", "eval_results.json", "trainer_state.json", "wandb_config.json"),
    *("nohup.out", "slurm-17.out", "wandb/run/debug.txt", "runs/x/metrics.csv", "notes.md", "todo.txt"),
    *("zero_to_fp32.py", "train.py", "latest", "dist/x-1.0-py3-none-any.whl", "Untitled.ipynb", "selfie.png"),
)
BELONGS = (
    *("tokenizer.model", "vocab.json", "merges.txt", "qwen.tiktoken", "tekken.json", "chat_template.jinja"),
    *("additional_chat_templates/tools.jinja", "sentence_bert_config.json", "1_Pooling/config.json"),
    *("LICENSE", "Notice.txt", "USE_POLICY.md", "README_zh.md", ".gitattributes", "nano_v3_reasoning_parser.py"),
)


@pytest.fixture
def source(tmp_path: Path) -> Path:
    return small_checkpoints.write(tmp_path / "source")


def put(root: Path, *names: str, text: str = "x") -> None:
    for name in names:
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)


def test_what_is_private_stays_where_it_is_and_is_named(source: Path, tmp_path: Path) -> None:
    put(source, *PRIVATE, *BELONGS)
    for number, make in enumerate((compress, dequantize)):
        made = make(source if make is compress else tmp_path / "0", tmp_path / str(number))
        found = tree(tmp_path / str(number))
        assert found.keys() & set(PRIVATE) == set()
        assert {*BELONGS} <= found.keys()
        assert "id_rsa" not in found[".openquant.json"].decode()
    left_out = open_checkpoint(source).left_out
    assert set(left_out) == {
        *(name for name in PRIVATE if "/" not in name),
        *(".ssh/", "data/", "wandb/", "runs/", "dist/"),
    }
    assert made.output is not None


ADAPTER = ("adapter_config.json", "adapter_model.safetensors")


def test_an_adapter_that_config_json_names_goes_along(tmp_path: Path) -> None:
    """Beside the weights (Granite Speech) and in folders (Phi-4-multimodal); of a trainer's none does."""
    source = small_checkpoints.write(tmp_path / "source", shards=2)
    folders = ("vision-lora/", "lora/speech/", "other-lora/", "")
    put(source, *(f"{folder}{name}" for folder in folders for name in ADAPTER), "vision-lora/optimizer.pt")
    unmerged = "adapter_config.json: the adapter beside the model is not merged into it"
    assert unmerged in compress(source, tmp_path / "none").notes
    assert not any("adapter" in name for name in tree(tmp_path / "none"))

    adapters = {"vision_lora": {"r": 256}, "adapters": [{"path": "./lora/speech"}], "has_lora_adapter": True}
    change_json(source / "config.json", lambda config: config.update(adapters))
    assert unmerged not in compress(source, tmp_path / "out", "channel").notes
    expected = {f"{folder}{name}" for folder in ("vision-lora/", "lora/speech/", "") for name in ADAPTER}
    assert {name for name in tree(tmp_path / "out") if "lora" in name or "adapter" in name} == expected
    assert open_checkpoint(source).left_out == ("other-lora/", "vision-lora/optimizer.pt")
    # It is an output like others.
    assert verify(tmp_path / "out", source, full=True).problems == ()
    assert verify(tmp_path / "out").problems == ()
    assert compress(source, tmp_path / "out", "channel").resumed
    compress(tmp_path / "out", tmp_path / "again", "block")
    assert {*expected} <= tree(tmp_path / "again").keys()


def test_code_goes_along_if_a_config_names_it_and_so_does_what_it_imports(source: Path) -> None:
    put(source, "modeling_own.py", text="from .layers import Layer\nimport torch\nfrom . import rope, masks\n")
    put(source, "layers.py", text="from .rope import rotate\nfrom .modeling_own import Model\n")
    put(source, "rope.py", "masks.py", "tokenization_own.py", "torch.py", "finetune.py", "custom_generate/generate.py")

    def code() -> set[str]:
        return {name for name in open_checkpoint(source).files if name.endswith(".py")}

    assert code() == {"custom_generate/generate.py"}
    change_json(source / "config.json", lambda config: config.update(auto_map={"AutoModel": "modeling_own.Model"}))
    expected = {"custom_generate/generate.py", "modeling_own.py", "layers.py", "rope.py", "masks.py"}
    assert code() == expected
    tokenizer = {"auto_map": {"AutoTokenizer": ["tokenization_own.Slow", None], "AutoProcessor": "org/other--torch.P"}}
    (source / "tokenizer_config.json").write_text(json.dumps(tokenizer))
    assert code() == expected | {"tokenization_own.py"}


def test_further_files_are_copied_if_asked_for_but_no_hidden_ones(source: Path, tmp_path: Path) -> None:
    put(source, "prompts/a.txt", "prompts/.key", ".env", "train.py", "lora/a.safetensors")
    put(source, "adapter_config.json", "mtp.safetensors")
    compress(source, tmp_path / "out", copy=["prompts/*", "*.py", "*"])
    found = tree(tmp_path / "out")
    assert {"prompts/a.txt", "train.py", "lora/a.safetensors"} <= found.keys()
    assert found.keys() & {"prompts/.key", ".env", "adapter_config.json", "mtp.safetensors"} == set()
    assert verify(tmp_path / "out", source).problems == ()
    (tmp_path / "out" / "prompts" / "a.txt").write_text("another")
    assert verify(tmp_path / "out", source).problems == ("prompts/a.txt differs from the source's",)
    with pytest.raises(UsageError, match=f"^--copy promts/\\* names no file of {source} that may be copied"):
        compress(source, tmp_path / "other", copy="promts/*")
    assert not (tmp_path / "other").exists()


def test_weights_of_sentence_transformers_modules_go_along(source: Path, tmp_path: Path) -> None:
    kinds = ("Transformer", "Pooling", "Dense")
    modules = [
        {"path": path, "type": f"sentence_transformers.models.{kind}"}
        for path, kind in zip(("", "1_Pooling", "2_Dense"), kinds, strict=True)
    ]
    (source / "modules.json").write_text(json.dumps(modules))
    put(
        source, "1_Pooling/config.json", "2_Dense/config.json", "2_Dense/model.safetensors", "3_Dense/model.safetensors"
    )
    compress(source, tmp_path / "out")
    found = tree(tmp_path / "out")
    assert found["2_Dense/model.safetensors"] == b"x"
    assert "3_Dense/model.safetensors" not in found
    assert compress(source, tmp_path / "out").resumed
    assert verify(tmp_path / "out", source).problems == ()

    # Embeddings without their projection are others.
    (source / "2_Dense" / "model.safetensors").unlink()
    with pytest.raises(SourceError, match=r"^modules\.json names 2_Dense, a Dense layer, whose weights are not there"):
        compress(source, tmp_path / "new")
    (tmp_path / "out" / "2_Dense" / "model.safetensors").unlink()
    assert verify(tmp_path / "out").problems[0].startswith("modules.json names 2_Dense, a Dense layer")


def test_pictures_and_texts_go_along_if_the_card_names_them(source: Path) -> None:
    put(source, "assets/logo.png", "assets/me.png", "docs/serving.md", "report.pdf", "plan.md")
    card = "![logo](assets/logo.png), [serving](docs/serving.md), report.pdf"
    (source / "README.md").write_text(card)
    checkpoint = open_checkpoint(source)
    assert {"assets/logo.png", "docs/serving.md", "report.pdf"} <= checkpoint.files.keys()
    assert checkpoint.left_out == ("assets/me.png", "plan.md")


def test_an_adapter_that_config_json_names_and_that_is_not_there_is_refused(tmp_path: Path) -> None:
    source = small_checkpoints.write(tmp_path / "source", shards=2)
    put(source, ADAPTER[0])
    compress(source, tmp_path / "out")
    for root in (source, tmp_path / "out"):
        change_json(root / "config.json", lambda config: config.update(has_lora_adapter=True))
    refused = "config.json says that the model has an adapter (has_lora_adapter), and none lies beside"
    with pytest.raises(SourceError, match=re.escape(refused)):
        compress(source, tmp_path / "other")
    assert verify(tmp_path / "out").problems[0].startswith(refused)
