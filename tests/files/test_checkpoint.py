"""Opening a source: what is read, and every way it can be broken."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from openquant import compress
from openquant.errors import OutputError, SourceError
from openquant.files import checkpoint as checkpoints
from openquant.files.checkpoint import open_checkpoint
from openquant.files.small_files import short_repr
from openquant.files.tensors import TensorInfo
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


def test_files_are_sorted_into_what_belongs_and_what_does_not(source: Path) -> None:
    belongs = [
        "LICENSE",
        "chat_template.jinja",
        "modeling_custom.py",
        "processor/preprocessor_config.json",
        ".gitattributes",
    ]
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


@pytest.mark.parametrize("name", ["config.json", INDEX, "tokenizer.json", "processor/tokenizer.model", "README.md"])
def test_a_pointer_of_git_lfs_in_place_of_a_small_file(source: Path, name: str) -> None:
    pointer = f"version https://git-lfs.github.com/spec/v1\noid sha256:{'0' * 64}\nsize 11422654\n"
    (source / name).parent.mkdir(exist_ok=True)
    (source / name).write_text(pointer)
    message = f"{source / name} is a pointer of git-lfs, not the file itself"
    assert_refused(source, message, "fetch the files: git lfs pull")
    with pytest.raises(SourceError) as caught:
        compress(source, dry_run=True)
    assert caught.value.message == message


def test_a_picture_may_be_a_pointer_of_git_lfs(source: Path) -> None:
    (source / "Figure.PNG").write_text("version https://git-lfs.github.com/spec/v1\n")
    assert "Figure.PNG" in open_checkpoint(source).files


def test_a_file_that_shows_a_pointer_of_git_lfs_is_none(source: Path) -> None:
    (source / "NOTICE").write_text("A pointer:\nversion https://git-lfs.github.com/spec/v1\n")
    assert "NOTICE" in open_checkpoint(source).files


@pytest.mark.parametrize("name", ["../evil.json", "/etc/evil", "a//b", "a\\b", "a\nb"])
def test_a_repository_lists_only_possible_files(source: Path, name: str) -> None:
    with pytest.raises(SourceError, match="is no possible file of a repository"):
        open_checkpoint(source, absent={name: 1})


def test_missing_path(tmp_path: Path) -> None:
    assert_refused(
        tmp_path / "a" / "b", f"{tmp_path}/a/b does not exist, and is no Hub repository id either", "check the path"
    )


def test_file_instead_of_directory(source: Path) -> None:
    file = source / "model-00001-of-00003.safetensors"
    assert_refused(file, f"{file} is a file, not a checkpoint directory", "give the directory that holds it")


def test_directory_without_a_checkpoint(tmp_path: Path) -> None:
    folder = tmp_path / "folder"
    folder.mkdir()
    assert_refused(folder, f"{folder} is not a checkpoint: it has no config.json")
    (folder / ".openquant.json").write_text("{}")
    assert_refused(
        folder,
        f"{folder} is unfinished or damaged: it has a .openquant.json and no config.json",
        "run the command that makes it again: it continues; or remove the directory",
    )
    (folder / "config.json").write_text('{"architectures": ["Qwen3ForCausalLM"]}')
    assert_refused(folder, f"{folder} is not a checkpoint: it holds no safetensors weights")


def test_adapter(tmp_path: Path) -> None:
    folder = tmp_path / "adapter"
    folder.mkdir()
    (folder / "adapter_config.json").write_text("{}")
    save_file({"a": torch.zeros(1)}, folder / "adapter_model.safetensors")
    expected = f"{folder} holds only an adapter, not a model"
    assert_refused(
        folder,
        expected,
        "merge it into its base model first (peft: merge_and_unload, then save_pretrained of model and tokenizer)",
    )
    (folder / "config.json").write_text('{"architectures": ["Qwen3ForCausalLM"]}')
    assert_refused(folder, expected)


def test_pickled_weights_are_refused_and_not_opened(tmp_path: Path) -> None:
    folder = tmp_path / "pickled"
    folder.mkdir()
    (folder / "config.json").write_text('{"architectures": ["Qwen3ForCausalLM"]}')
    # Unpickling this would leave a file behind.
    (folder / "pytorch_model.bin").write_bytes(b"cposix\nsystem\n(S'touch " + str(folder / "ran").encode() + b"'\ntR.")
    assert_refused(folder, f"{folder} holds pickled weights (pytorch_model.bin); only safetensors are read")
    assert not (folder / "ran").exists()


def test_shards_without_an_index(source: Path) -> None:
    (source / INDEX).unlink()
    assert_refused(source, f"{source} holds model-00001-of-00003.safetensors but neither model.safetensors nor {INDEX}")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "config.json is not valid JSON: Expecting property name enclosed in double quotes: line 1 column 2 (char 1)"),
        ("\xff", "config.json is not valid JSON: Expecting value: line 1 column 1 (char 0)"),
        ("[]", "config.json is not a JSON object"),
        ("{}", "config.json names no architecture (architectures: null)"),
        ('{"architectures": []}', "config.json names no architecture (architectures: [])"),
        ('{"architectures": "Qwen3ForCausalLM"}', 'config.json names no architecture (architectures: "Qwen3ForCausalLM")'),
        ('{"architectures": [3]}', "config.json names no architecture (architectures: [3])"),
    ],
)  # fmt: skip
def test_broken_config(source: Path, text: str, message: str) -> None:
    (source / "config.json").write_text(text)
    assert_refused(source, f"{source}/{message}")


def test_a_config_of_too_many_levels(source: Path) -> None:
    (source / "config.json").write_text("[" * 100000)
    with pytest.raises(SourceError, match=re.escape(f"{source}/config.json is not valid JSON: ")) as caught:
        open_checkpoint(source)
    # Releases of Python say it in other words.
    assert caught.value.message.endswith(" while decoding a JSON array from a unicode string")


@pytest.mark.parametrize(
    "shard", ["../outside.safetensors", "/etc/x.safetensors", "sub/x.safetensors", "..", "a\\b.safetensors", ""]
)
def test_index_leading_out_of_the_directory(source: Path, shard: str) -> None:
    # The file exists and is sound: only its place is wrong.
    shutil.copy(source / "model-00001-of-00003.safetensors", source.parent / "outside.safetensors")
    edit_index(source, lambda index: index["weight_map"].update({"model.norm.weight": shard}))
    assert_refused(source, f"{source / INDEX} places model.norm.weight in {shard!r}, which is not a plain file name")


def test_index_naming_pickles(source: Path) -> None:
    edit_index(source, lambda index: index["weight_map"].update({"model.norm.weight": "pytorch_model.bin"}))
    assert_refused(
        source, f"{source / INDEX} places model.norm.weight in pytorch_model.bin, which is not a safetensors file"
    )


@pytest.mark.parametrize("text", ["[]", "{}", '{"weight_map": {}}', '{"weight_map": {"a": 1}}'])
def test_index_without_a_map(source: Path, text: str) -> None:
    (source / INDEX).write_text(text)
    assert_refused(source, f"{source / INDEX} has no weight_map of tensor to file names")


def test_broken_index(source: Path) -> None:
    (source / INDEX).write_text("nope")
    assert_refused(source, f"{source / INDEX} is not valid JSON: Expecting value: line 1 column 1 (char 0)")


def test_index_naming_a_missing_shard(source: Path) -> None:
    (source / "model-00002-of-00003.safetensors").unlink()
    assert_refused(source, f"model-00002-of-00003.safetensors is missing from {source}", "download or copy it again")


def test_index_naming_a_tensor_its_shard_lacks(source: Path) -> None:
    edit_index(source, lambda i: i["weight_map"].update({"model.extra.weight": "model-00001-of-00003.safetensors"}))
    assert_refused(
        source,
        f"{source / INDEX} places model.extra.weight in model-00001-of-00003.safetensors, which does not hold it",
    )


def test_index_without_a_tensor_that_is_there(source: Path) -> None:
    edit_index(source, lambda index: index["weight_map"].pop("lm_head.weight"))
    shard = open_checkpoint(small_checkpoints.write(source.parent / "same", shards=3)).where["lm_head.weight"].shard
    assert_refused(source, f"{shard} holds lm_head.weight, which {source / INDEX} does not list")


def test_tensor_in_two_shards(source: Path) -> None:
    weights = small_checkpoints.read(source)
    extra = "model-00004-of-00004.safetensors"
    save_file({"model.norm.weight": weights["model.norm.weight"]}, source / extra)
    first = json.loads((source / INDEX).read_text())["weight_map"]["model.norm.weight"]
    # Another tensor brings the fourth shard in; the norm is in it as well.
    save_file({"model.norm.weight": weights["model.norm.weight"], "new.bias": torch.zeros(1)}, source / extra)
    edit_index(source, lambda index: index["weight_map"].update({"new.bias": extra}))
    assert_refused(source, f"model.norm.weight is in two shards: {first} and {extra}")


@pytest.mark.parametrize("keep", [0, 7, 8, 100, -1])
def test_truncated_shard(source: Path, keep: int) -> None:
    name = source / "model-00002-of-00003.safetensors"
    whole = name.read_bytes()
    name.write_bytes(whole[:keep])
    length = int.from_bytes(whole[:8], "little")
    size = len(whole[:keep])
    message = {
        0: f"{name} is 0 bytes long, too short for a safetensors file",
        7: f"{name} is 7 bytes long, too short for a safetensors file",
        8: f"{name} is truncated: its header ends at byte {8 + length} of 8",
        100: f"{name} is truncated: its header ends at byte {8 + length} of 100",
        -1: f"{name} is truncated: it has {size} bytes, its header says {len(whole)}",
    }[keep]
    assert_refused(source, message)


F32 = entry("F32", [2], 0, 8)
HEADERS = {
    "no header at all": (raw(b"", length=0), "x claims a header of 0 bytes (2 to 100000000 are allowed)"),
    "absurd length": (raw(b"{}", length=2**63), f"x claims a header of {2**63} bytes (2 to 100000000 are allowed)"),
    "a pointer of git-lfs": (b"version https://git-lfs.github.com/spec/v1", "x is a pointer of git-lfs, not the file itself"),
    "a web page": (b"<!DOCTYPE html><html>", "x is a web page, not the file itself"),
    "a web page without a type": (b"\n<HTML lang=en>", "x is a web page, not the file itself"),
    "not JSON": (raw(b"{nope}"), "x has a broken header: Expecting property name enclosed in double quotes: line 1 column 2 (char 1)"),
    "not UTF-8": (raw(b'{"\xff":1}'), "x has a broken header: 'utf-8' codec can't decode byte 0xff in position 2: invalid start byte"),
    "not an object": (raw([1, 2]), "x has a header that is not a JSON object"),
    "UTF-16": (raw('{"a":1}'.encode("utf-16")), "x has a broken header: 'utf-8' codec can't decode byte 0xff in position 0: invalid start byte"),
    "byte-order mark": (raw(b'\xef\xbb\xbf{"a":1}'), "x has a broken header: Unexpected UTF-8 BOM (decode using utf-8-sig): line 1 column 1 (char 0)"),
    "half a surrogate pair": (raw(b'{"\xed\xa0\x80":1}'), "x has a broken header: 'utf-8' codec can't decode byte 0xed in position 2: invalid continuation byte"),
    "metadata: number": (raw({"__metadata__": {"a": 1}}), "x has a __metadata__ that does not map names to strings"),
    "metadata: null": (raw({"__metadata__": {"a": None}}), "x has a __metadata__ that does not map names to strings"),
    "metadata: list": (raw({"__metadata__": []}), "x has a __metadata__ that does not map names to strings"),
    "metadata: string": (raw({"__metadata__": "pt"}), "x has a __metadata__ that does not map names to strings"),
    "duplicate name": (raw(b'{"a":{"dtype":"F32","shape":[2],"data_offsets":[0,8]},"a":{"dtype":"F32","shape":[2],"data_offsets":[0,8]}}', b"0" * 8), "x has a broken header: a appears twice"),
    "entry is a list": (raw({"a": []}), "x: a is not described by exactly dtype, shape and data_offsets"),
    "entry lacks dtype": (raw({"a": {"shape": [2], "data_offsets": [0, 8]}}), "x: a is not described by exactly dtype, shape and data_offsets"),
    "unknown dtype": (raw({"a": entry("F7", [2], 0, 8)}, b"0" * 8), "x: a has the unknown dtype 'F7'"),
    "dtype is a list": (raw({"a": {"dtype": ["F32"], "shape": [2], "data_offsets": [0, 8]}}), "x: a has the unknown dtype ['F32']"),
    "negative size": (raw({"a": entry("F32", [-2], 0, 8)}, b"0" * 8), "x: a has the impossible shape [-2]"),
    "size is a float": (raw({"a": entry("F32", [2.0], 0, 8)}, b"0" * 8), "x: a has the impossible shape [2.0]"),
    "size is a truth value": (raw({"a": entry("F32", [True], 0, 8)}, b"0" * 8), "x: a has the impossible shape [True]"),
    "negative offset": (raw({"a": entry("F32", [2], -8, 0)}, b"0" * 8), "x: a has impossible data_offsets [-8, 0]"),
    "zero-sized": (raw({"a": entry("F32", [0, 4], 0, 0)}), "x: a has no elements (shape [0, 4])"),
    "overlap": (raw({"a": F32, "b": entry("F32", [2], 4, 12)}, b"0" * 12), "x: b overlaps the tensor before it (starts at 4, not 8)"),
    "hole": (raw({"a": F32, "b": entry("F32", [2], 12, 20)}, b"0" * 20), "x: b leaves a hole before it (starts at 12, not 8)"),
    "hole at the start": (raw({"a": entry("F32", [2], 4, 12)}, b"0" * 12), "x: a leaves a hole before it (starts at 4, not 0)"),
    "backwards": (raw({"a": entry("F32", [2], 0, -1)}, b"0" * 8), "x: a has impossible data_offsets [0, -1]"),
    "does not fit its shape": (raw({"a": entry("F32", [3], 0, 8)}, b"0" * 8), "x: a spans 8 bytes, F32 [3] needs 12"),
    "huge shape": (raw({"a": entry("F32", [2**62, 2**62], 0, 8)}, b"0" * 8), f"x: a spans 8 bytes, F32 [{2**62}, {2**62}] needs {2**126}"),
    "beyond the file": (raw({"a": F32}, b"0" * 7), "x is truncated: it has 76 bytes, its header says 77"),
    "bytes nobody owns": (raw({"a": F32}, b"0" * 9), "x is followed by bytes that no tensor owns: it has 78 bytes, its header says 77"),
    "a name that a terminal obeys": (raw({"a\x1b[2J": F32}, b"0" * 8), "x: 'a\\x1b[2J' is not a possible name"),
    "a name for no terminal at all": (raw({"a" * 2000: F32}, b"0" * 8), f"x: '{'a' * 100}...' is not a possible name"),
    "an empty name": (raw({"": F32}, b"0" * 8), "x: '' is not a possible name"),
    "braces in a name": (raw({"model.layers.{0..3}.mlp.up_proj.weight": F32}, b"0" * 8), "x: 'model.layers.{0..3}.mlp.up_proj.weight' is not a possible name"),
    "half a brace in a name": (raw({"a}": F32}, b"0" * 8), "x: 'a}' is not a possible name"),
    "a star in a name": (raw({"model.layers.*.weight": F32}, b"0" * 8), "x: 'model.layers.*.weight' is not a possible name"),
    "an expression as a name": (raw({"re:.*": F32}, b"0" * 8), "x: 're:.*' is not a possible name"),
    "a shape of many axes": (raw({"a": entry("F32", [1] * 65, 0, 4)}, b"0" * 4), "x: a has the impossible shape [1, 1, 1, 1, 1, 1, ...]"),
    "a shape whose product takes hours": (raw(b'{"a":{"dtype":"F32","shape":[' + b",".join([b"9" * 4000] * 60) + b'],"data_offsets":[0,4]}}', b"0" * 4), "x: a has the impossible shape [" + f"{'9' * 18}...{'9' * 19}, " * 6 + "...]"),
    "a shape of the largest sizes": (raw({"a": entry("F32", [2**63 - 1] * 3, 0, 4)}, b"0" * 4), f"x: a spans 4 bytes, F32 [{2**63 - 1}, {2**63 - 1}, {2**63 - 1}] needs {short_repr(4 * (2**63 - 1) ** 3)}"),
    "a size of 64 bits": (raw({"a": entry("F32", [2**63], 0, 4)}, b"0" * 4), "x: a has the impossible shape [9223372036854775808]"),
    "a shape of shapes": (raw(b'{"a":{"dtype":"F32","shape":' + b"[" * 900 + b"]" * 900 + b',"data_offsets":[0,4]}}', b"0" * 4), "x: a has the impossible shape [[[[[[[...]]]]]]]"),
    "an offset of 64 bits": (raw({"a": entry("F32", [1], 0, 2**63)}, b"0" * 4), f"x: a has impossible data_offsets [0, {2**63}]"),
    "an offset beyond numbers": (raw(b'{"a":{"dtype":"F32","shape":[1],"data_offsets":[0,1e400]}}', b"0" * 4), "x: a has impossible data_offsets [0, inf]"),
    "no tensors": (raw({}), None),
}  # fmt: skip


def test_header_that_lies(subtests: pytest.Subtests, tmp_path: Path) -> None:
    for number, case in enumerate(HEADERS):
        with subtests.test(case=case):
            here = tmp_path / str(number)
            here.mkdir()
            data, message = HEADERS[case]
            source = here / "source"
            source.mkdir()
            (source / "config.json").write_text('{"architectures": ["Qwen3ForCausalLM"]}')
            (source / "model.safetensors").write_bytes(data)
            expected = (
                f"{source} holds no tensors" if message is None else message.replace("x", f"{source}/model.safetensors", 1)
            )
            assert_refused(source, expected)


HOSTS = {
    "entries": b'{"a":' + b'{},"a":' * 7_700_000 + b"{}}",
    "sizes": b'{"a":{"shape":[1' + b",1" * 8_100_000 + b"]}}",
    "metadata": b'{"__metadata__":{"a":""' + b',"a":""' * 4_100_000 + b"}}",
}


def test_a_header_for_more_tensors_than_any_model_has(subtests: pytest.Subtests, tmp_path: Path) -> None:
    for number, what in enumerate(HOSTS):
        with subtests.test(what=what):
            here = tmp_path / str(number)
            here.mkdir()
            source = here / "source"
            source.mkdir()
            (source / "config.json").write_text('{"architectures": ["Qwen3ForCausalLM"]}')
            (source / "model.safetensors").write_bytes(raw(HOSTS[what]))
            limit = "import resource; resource.setrlimit(resource.RLIMIT_DATA, (400 << 20, 400 << 20))"
            command = (
                f"{limit}; from openquant.cli.commands import main; raise SystemExit(main(['compress', '-m', {str(source)!r}]))"
            )
            done = subprocess.run([sys.executable, "-c", command], capture_output=True, text=True, timeout=120)
            assert (done.returncode, done.stderr.splitlines()[0]) == (
                2,
                f"error: {source}/model.safetensors has a header for more than 1,000,000 tensors",
            )


def test_shards_of_more_tensors_than_any_model_has(source: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checkpoints, "MAX_TENSORS", 20)
    assert_refused(source, f"{source} holds more than 20 tensors")


def test_an_index_of_more_values_than_any_model_has(source: Path) -> None:
    (source / INDEX).write_bytes(b'{"weight_map":{"a":1' + b',"a":1' * 4_100_000 + b"}}")
    assert_refused(source, f"{source / INDEX} holds more than 4,000,000 values")


@pytest.mark.parametrize("name", ["config.json", INDEX, "hf_quant_config.json"])
@pytest.mark.parametrize("kind", ["pipe", "device"])
def test_what_is_read_whole_is_a_regular_file(source: Path, name: str, kind: str) -> None:
    (source / name).unlink(missing_ok=True)
    if kind == "pipe":
        os.mkfifo(source / name)
    else:
        (source / name).symlink_to("/dev/zero")
    assert_refused(source, f"{source / name} is not a regular file")


def test_a_name_that_is_too_long_for_a_message(source: Path) -> None:
    edit_index(source, lambda index: index["weight_map"].update({"b" * 3000: "gone" * 100 + ".safetensors"}))
    assert_refused(
        source, f"{source / INDEX} places '{'b' * 100}...' in '{'gone' * 25}...', which is not a plain file name"
    )
    edit_index(source, lambda index: index["weight_map"].update({"b" * 3000: "model-00001-of-00003.safetensors"}))
    assert_refused(
        source, f"{source / INDEX} places '{'b' * 100}...' in model-00001-of-00003.safetensors, which does not hold it"
    )


def test_an_architecture_that_no_message_holds(source: Path) -> None:
    (source / "config.json").write_text(json.dumps({"architectures": ["x" * 10**6]}))
    assert_refused(source, f'{source}/config.json names no architecture (architectures: ["{"x" * 198})')


def test_dangling_link(source: Path) -> None:
    (source / "tokenizer.json").symlink_to("../../blobs/gone")
    assert_refused(source, "tokenizer.json is a broken link", "download or copy the checkpoint again")


def test_unreadable_shard(source: Path) -> None:
    name = "model-00003-of-00003.safetensors"
    (source / name).unlink()
    (source / name).mkdir()
    assert_refused(source, f"{name} is not a regular file", "download or copy the checkpoint again")
    (source / name).rmdir()
    os.mkfifo(source / name)
    assert_refused(source, f"{name} is not a regular file", "download or copy the checkpoint again")


@pytest.fixture
def nobody() -> Iterator[Path]:
    """A directory for anyone, and a user who is not root."""
    with tempfile.TemporaryDirectory() as folder:
        Path(folder).chmod(0o777)
        user = os.geteuid()
        if user == 0:
            os.seteuid(65534)
        try:
            yield Path(folder)
        finally:
            os.seteuid(user)


@pytest.mark.parametrize("name", ["config.json", "model-00002-of-00003.safetensors", INDEX])
def test_no_permission_for_a_file(nobody: Path, name: str) -> None:
    source = small_checkpoints.write(nobody / "source", shards=3)
    (source / name).chmod(0)
    hint = "check the file and its permissions"
    assert_refused(source, f"{source / name} cannot be read: Permission denied", hint)


def test_no_permission_for_the_directory(nobody: Path) -> None:
    source = small_checkpoints.write(nobody / "locked" / "source")
    (nobody / "locked").chmod(0)
    with pytest.raises(SourceError, match="locked/source cannot be read: Permission denied"):
        compress(source, nobody / "out")
    (nobody / "locked").chmod(0o700)


def test_no_permission_for_the_output(nobody: Path) -> None:
    source = small_checkpoints.write(nobody / "source")
    (nobody / "shut").mkdir(mode=0o500)
    with pytest.raises(OutputError, match="shut/out cannot be written: Permission denied"):
        compress(source, nobody / "shut" / "out")
