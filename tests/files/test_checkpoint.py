"""Opening a source: what is read, and every way it can be broken."""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from openquant import compress
from openquant.errors import SourceError
from openquant.files.checkpoint import open_checkpoint
from openquant.files.shardfile import TensorInfo
from support import small_checkpoints

INDEX = "model.safetensors.index.json"


def raw(header: Any, data: bytes = b"", length: int | None = None) -> bytes:
    """A safetensors file with any header, valid or not."""
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return (len(text) if length is None else length).to_bytes(8, "little") + text + data


def entry(dtype: str, shape: list[Any], begin: Any, end: Any) -> dict[str, Any]:
    return {"dtype": dtype, "shape": shape, "data_offsets": [begin, end]}


def edit_index(source: Path, change: Callable[[dict[str, Any]], Any]) -> None:
    index = json.loads((source / INDEX).read_text())
    change(index)
    (source / INDEX).write_text(json.dumps(index))


def assert_refused(source: Path, message: str, hint: str | None = None) -> None:
    """Opening fails with exactly this message, and a run leaves no output directory."""
    with pytest.raises(SourceError) as caught:
        compress(source, source.parent / "refused")
    assert caught.value.message == message
    assert caught.value.hint
    if hint is not None:
        assert caught.value.hint == hint
    assert not (source.parent / "refused").exists()


def test_every_tensor_is_found_where_the_library_put_it(source: Path) -> None:
    checkpoint = open_checkpoint(source)
    weights = small_checkpoints.read(source)
    assert set(checkpoint.tensors) == set(weights)
    for name, weight in weights.items():
        assert checkpoint.tensors[name] == TensorInfo(name, "BF16", tuple(weight.shape))
        place = checkpoint.where[name]
        nbytes = weight.numel() * 2
        found = (source / place.shard).read_bytes()[place.offset : place.offset + nbytes]
        assert found == weight.contiguous().view(torch.uint8).numpy().tobytes()
    assert checkpoint.architecture == "Qwen3ForCausalLM"
    assert list(checkpoint.shards) == [f"model-0000{n}-of-00003.safetensors" for n in (1, 2, 3)]


Harm = Callable[[Path], object]
ONE, TWO, THREE = (f"model-0000{number}-of-00003.safetensors" for number in (1, 2, 3))
ARCHITECTURE = '{"architectures": ["Qwen3ForCausalLM"]}'
POINTER = f"version https://git-lfs.github.com/spec/v1\noid sha256:{'0' * 64}\nsize 11422654\n"
LONG = "b" * 3000


def writes(name: str, text: str | bytes) -> Harm:
    def harm(source: Path) -> None:
        (source / name).parent.mkdir(exist_ok=True)
        (source / name).write_bytes(text if isinstance(text, bytes) else text.encode())

    return harm


def places(tensor: str, shard: str) -> Harm:
    return lambda source: edit_index(source, lambda index: index["weight_map"].update({tensor: shard}))


def is_pipe(name: str) -> Harm:
    def harm(source: Path) -> None:
        (source / name).unlink(missing_ok=True)
        os.mkfifo(source / name)

    return harm


def is_device(name: str) -> Harm:
    def harm(source: Path) -> None:
        (source / name).unlink(missing_ok=True)
        (source / name).symlink_to("/dev/zero")

    return harm


def is_folder(source: Path) -> None:
    (source / THREE).unlink()
    (source / THREE).mkdir()


def twice(source: Path) -> None:
    """Another tensor brings a fourth shard in; the norm is in it as well."""
    extra = "model-00004-of-00004.safetensors"
    save_file({"model.norm.weight": torch.zeros(256, dtype=torch.bfloat16), "new.bias": torch.zeros(1)}, source / extra)
    places("new.bias", extra)(source)


FETCH, AGAIN = "fetch the files: git lfs pull", "download or copy it again"
AGAIN_ALL = "download or copy the checkpoint again"
# What is done to a source, and the message and hint about it; SOURCE stands for its path.
DAMAGE: list[tuple[Harm, str, str | None]] = [
    *((writes(name, POINTER), f"SOURCE/{name} is a pointer of git-lfs, not the file itself", FETCH)
      for name in ("config.json", INDEX, "tokenizer.json", "processor/tokenizer.model", "README.md")),
    (lambda source: (source / INDEX).unlink(),
     f"SOURCE holds {ONE} but neither model.safetensors nor {INDEX}", None),
    *((writes("config.json", text), f"SOURCE/config.json {message}", None) for text, message in {
        "{": "is not valid JSON: Expecting property name enclosed in double quotes: line 1 column 2 (char 1)",
        "\xff": "is not valid JSON: Expecting value: line 1 column 1 (char 0)",
        "[]": "is not a JSON object",
        "{}": "names no architecture (architectures: null)",
        '{"architectures": []}': "names no architecture (architectures: [])",
        '{"architectures": "Qwen3ForCausalLM"}': 'names no architecture (architectures: "Qwen3ForCausalLM")',
        '{"architectures": [3]}': "names no architecture (architectures: [3])",
        json.dumps({"architectures": ["x" * 10**6]}): f'names no architecture (architectures: ["{"x" * 198})',
    }.items()),
    *((places("model.norm.weight", shard),
       f"SOURCE/{INDEX} places 'model.norm.weight' in {shard!r}, which is not a plain file name", None)
      for shard in ("../outside.safetensors", "/etc/x.safetensors", "sub/x.safetensors", "..", "a\\b.safetensors", "")),
    (places("model.norm.weight", "pytorch_model.bin"),
     f"SOURCE/{INDEX} places 'model.norm.weight' in pytorch_model.bin, which is not a safetensors file", None),
    *((writes(INDEX, text), f"SOURCE/{INDEX} has no weight_map of tensor to file names", None)
      for text in ("[]", "{}", '{"weight_map": {}}', '{"weight_map": {"a": 1}}')),
    (writes(INDEX, "nope"), f"SOURCE/{INDEX} is not valid JSON: Expecting value: line 1 column 1 (char 0)", None),
    (lambda source: (source / TWO).unlink(), f"{TWO} is missing from SOURCE", AGAIN),
    (places("model.extra.weight", ONE),
     f"SOURCE/{INDEX} places 'model.extra.weight' in {ONE}, which does not hold it", None),
    (lambda source: edit_index(source, lambda index: index["weight_map"].pop("lm_head.weight")),
     f"SHARD of lm_head.weight holds lm_head.weight, which SOURCE/{INDEX} does not list", None),
    (twice, "model.norm.weight is in two shards: SHARD of model.norm.weight and model-00004-of-00004.safetensors", None),
    (places(LONG, ONE), f"SOURCE/{INDEX} places '{'b' * 100}...' in {ONE}, which does not hold it", None),
    (lambda source: (source / "tokenizer.json").symlink_to("../../blobs/gone"), "tokenizer.json is a broken link",
     AGAIN_ALL),
    (is_folder, f"{THREE} is not a regular file", AGAIN_ALL),
    (is_pipe(THREE), f"{THREE} is not a regular file", AGAIN_ALL),
    *((kind(name), f"SOURCE/{name} is not a regular file", None)
      for kind in (is_pipe, is_device) for name in ("config.json", INDEX, "hf_quant_config.json")),
]  # fmt: skip


def test_every_damage_is_told(subtests: pytest.Subtests, source: Path, tmp_path: Path) -> None:
    where = open_checkpoint(source).where
    # The file exists and is sound: only its place is wrong.
    shutil.copy(source / ONE, tmp_path / "outside.safetensors")
    for number, (harm, message, hint) in enumerate(DAMAGE):
        with subtests.test(message):
            damaged = shutil.copytree(source, tmp_path / str(number))
            harm(damaged)
            told = re.sub(r"SHARD of (\S+)", lambda found: where[found[1]].shard, message)
            told = told.replace("SOURCE", str(damaged))
            assert_refused(damaged, told, hint)
            if hint == FETCH:
                with pytest.raises(SourceError, match=re.escape(told)):
                    compress(damaged, dry_run=True)


def test_what_is_no_checkpoint_is_told(source: Path, tmp_path: Path) -> None:
    missing, file = tmp_path / "a" / "b", source / ONE
    assert_refused(missing, f"{missing} does not exist, and is no Hub repository id either", "check the path")
    assert_refused(file, f"{file} is a file, not a checkpoint directory", "give the directory that holds it")

    folder = tmp_path / "folder"
    folder.mkdir()
    assert_refused(folder, f"{folder} is not a checkpoint: it has no config.json", "give the directory that holds it")
    (folder / "checkpoint-500").mkdir()
    (folder / "checkpoint-500" / "config.json").write_text("{}")
    hint = f"did you mean {folder}/checkpoint-500?"
    assert_refused(folder, f"{folder} is not a checkpoint: it has no config.json", hint)
    (folder / "params.json").write_text("{}")
    assert_refused(folder, f"{folder} holds a model in Mistral's own form (params.json), without a config.json")
    (folder / ".openquant.json").write_text("{}")
    assert_refused(
        folder,
        f"{folder} is unfinished or damaged: it has a .openquant.json and no config.json",
        "run the command that makes it again: it continues; or remove the directory",
    )
    (folder / "config.json").write_text(ARCHITECTURE)
    assert_refused(folder, f"{folder} is not a checkpoint: it holds no safetensors weights")
    # Unpickling this would leave a file behind.
    (folder / "pytorch_model.bin").write_bytes(b"cposix\nsystem\n(S'touch " + str(folder / "ran").encode() + b"'\ntR.")
    assert_refused(folder, f"{folder} holds pickled weights (pytorch_model.bin); only safetensors are read")
    assert not (folder / "ran").exists()

    adapter = tmp_path / "adapter"
    adapter.mkdir()
    (adapter / "adapter_config.json").write_text("{}")
    save_file({"a": torch.zeros(1)}, adapter / "adapter_model.safetensors")
    merge = "merge it into its base model first (peft: merge_and_unload, then save_pretrained of model and tokenizer)"
    assert_refused(adapter, f"{adapter} holds only an adapter, not a model", merge)
    (adapter / "config.json").write_text(ARCHITECTURE)
    assert_refused(adapter, f"{adapter} holds only an adapter, not a model")


F32 = entry("F32", [2], 0, 8)
HEADERS = {
    "no header at all": (raw(b"", length=0), "x claims a header of 0 bytes (2 to 100000000 are allowed)"),
    "absurd length": (raw(b"{}", length=2**63), f"x claims a header of {2**63} bytes (2 to 100000000 are allowed)"),
    "a pointer of git-lfs": (b"version https://git-lfs.github.com/spec/v1", "x is a pointer of git-lfs, not the file itself"),
    "not JSON": (raw(b"{nope}"), "x has a broken header: Expecting property name enclosed in double quotes: line 1 column 2 (char 1)"),
    "not UTF-8": (raw(b'{"\xff":1}'), "x has a broken header: 'utf-8' codec can't decode byte 0xff in position 2: invalid start byte"),
    "byte-order mark": (raw(b'\xef\xbb\xbf{"a":1}'), "x has a broken header: Unexpected UTF-8 BOM (decode using utf-8-sig): line 1 column 1 (char 0)"),
    "entry is a list": (raw({"a": []}), "x has a broken header: list indices must be integers or slices, not str"),
    "entry lacks dtype": (raw({"a": {"shape": [2], "data_offsets": [0, 8]}}), "x has a broken header: 'dtype'"),
    "offset is a list": (raw({"a": entry("F32", [2], [], 8)}), "x has a broken header: 'list' object cannot be interpreted as an integer"),
    "unknown dtype": (raw({"a": entry("F7", [2], 0, 8)}, b"0" * 8), "x: a has the unknown dtype 'F7'"),
    "dtype is a list": (raw({"a": {"dtype": ["F32"], "shape": [2], "data_offsets": [0, 8]}}), "x: a has the unknown dtype ['F32']"),
    "negative size": (raw({"a": entry("F32", [-2], 0, 8)}, b"0" * 8), "x: a has the impossible shape [-2]"),
    "size is a float": (raw({"a": entry("F32", [2.0], 0, 8)}, b"0" * 8), "x: a has the impossible shape [2.0]"),
    "negative offset": (raw({"a": entry("F32", [2], -8, 0)}, b"0" * 8), "x: a overlaps the tensor before it (starts at -8, not 0)"),
    "zero-sized": (raw({"a": entry("F32", [0, 4], 0, 0)}), "x: a has no elements (shape [0, 4])"),
    "overlap": (raw({"a": F32, "b": entry("F32", [2], 4, 12)}, b"0" * 12), "x: b overlaps the tensor before it (starts at 4, not 8)"),
    "hole": (raw({"a": F32, "b": entry("F32", [2], 12, 20)}, b"0" * 20), "x: b leaves a hole before it (starts at 12, not 8)"),
    "does not fit its shape": (raw({"a": entry("F32", [3], 0, 8)}, b"0" * 8), "x: a spans 8 bytes, F32 [3] needs 12"),
    "huge shape": (raw({"a": entry("F32", [2**62, 2**62], 0, 8)}, b"0" * 8), f"x: a spans 8 bytes, F32 [{2**62}, {2**62}] needs {2**126}"),
    "beyond the file": (raw({"a": F32}, b"0" * 7), "x is truncated: it has 76 bytes, its header says 77"),
    "bytes nobody owns": (raw({"a": F32}, b"0" * 9), "x is followed by bytes that no tensor owns: it has 78 bytes, its header says 77"),
    "a name that a terminal obeys": (raw({"a\x1b[2J": F32}, b"0" * 8), "x: 'a\\x1b[2J' is not a possible name"),
    "braces in a name": (raw({"model.layers.{0..3}.mlp.up_proj.weight": F32}, b"0" * 8), "x: 'model.layers.{0..3}.mlp.up_proj.weight' is not a possible name"),
    "a star in a name": (raw({"model.layers.*.weight": F32}, b"0" * 8), "x: 'model.layers.*.weight' is not a possible name"),
    "a shape of many axes": (raw({"a": entry("F32", [1] * 65, 0, 4)}, b"0" * 4), "x: a has the impossible shape [1, 1, 1, 1, 1, 1, ...]"),
    "a size of 64 bits": (raw({"a": entry("F32", [2**63], 0, 4)}, b"0" * 4), "x: a has the impossible shape [9223372036854775808]"),
    "no tensors": (raw({}), None),
}  # fmt: skip


def of_one_file(root: Path, data: bytes) -> Path:
    root.mkdir()
    (root / "config.json").write_text(ARCHITECTURE)
    (root / "model.safetensors").write_bytes(data)
    return root


def test_a_header_that_lies_is_told(subtests: pytest.Subtests, tmp_path: Path) -> None:
    for case, (data, message) in HEADERS.items():
        with subtests.test(case):
            source = of_one_file(tmp_path / case.replace("/", " "), data)
            told = message.replace("x", f"{source}/model.safetensors", 1) if message else f"{source} holds no tensors"
            assert_refused(source, told)


def test_two_models_in_a_directory_are_refused(tmp_path: Path) -> None:
    source = small_checkpoints.write(tmp_path / "source", shards=2)
    (source / "model.safetensors").write_bytes((source / "model-00001-of-00002.safetensors").read_bytes())
    assert open_checkpoint(source).left_out == ("model.safetensors",)
    (source / "model.safetensors.index.json").unlink()
    assert_refused(
        source,
        f"{source} holds two models: model.safetensors, and model-00001-of-00002.safetensors without an index",
        "remove the older one, or copy the model.safetensors.index.json of the other",
    )


def test_a_truncated_shard_and_an_impossible_name_are_told(source: Path) -> None:
    name = source / TWO
    whole = name.read_bytes()
    length = int.from_bytes(whole[:8], "little")
    for keep, message in {
        7: "is 7 bytes long, too short for a safetensors file",
        100: f"is truncated: its header ends at byte {8 + length} of 100",
        -1: f"is truncated: it has {len(whole) - 1} bytes, its header says {len(whole)}",
    }.items():
        name.write_bytes(whole[:keep])
        assert_refused(source, f"{name} {message}")


def test_files_are_sorted_into_what_belongs_and_what_does_not(source: Path) -> None:
    belongs = ["LICENSE", "chat_template.jinja", "processor/preprocessor_config.json", ".gitattributes"]
    leftovers = [
        "pytorch_model.bin", "pytorch_model.bin.index.json", "a.pth", "optimizer.pt", "last.ckpt", "tf_model.h5",
        "model.onnx", "model.onnx_data", "model.gguf", "flax_model.msgpack", "extra.safetensors", "consolidated.00.txt",
        "adapter_config.json", "adapter_model.safetensors",
        "original/params.json", "consolidated/x.json", "checkpoint-500/trainer_state.json", ".git/config",
        ".cache/huggingface/x.json", "__pycache__/modeling_custom.pyc",
    ]  # fmt: skip
    for name in belongs + leftovers:
        (source / name).parent.mkdir(parents=True, exist_ok=True)
        (source / name).write_text(name)
    checkpoint = open_checkpoint(source)
    assert set(checkpoint.files) == {*belongs, "config.json", "generation_config.json"}
    folders = {"original/", "consolidated/", "checkpoint-500/", ".git/", ".cache/", "__pycache__/"}
    assert set(checkpoint.left_out) == {name for name in leftovers if "/" not in name} | folders
