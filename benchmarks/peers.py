"""The table "Beside llm-compressor, auto-round and GPTQModel" of docs/peers.md: the tools on one model.

    python benchmarks/real_models.py DIR
    python -m venv DIR/peers
    DIR/peers/bin/pip install torch==2.13.0 llmcompressor==0.14.0.1 auto-round==0.15.1
    python -m venv DIR/gptqmodel
    DIR/gptqmodel/bin/pip install torch==2.13.0 setuptools wheel numpy
    BUILD_CUDA_EXT=0 DIR/gptqmodel/bin/pip install --no-build-isolation gptqmodel==7.7.0
    python benchmarks/peers.py DIR --peer DIR/peers/bin/python --gptqmodel DIR/gptqmodel/bin/python --work WORK

All write the same formats: integers in groups of 64, symmetric, and NVFP4 weights, which is 4.25 bits a weight with
INT4 and 4.5. Other widths than four bits are made by llm-compressor's model_free_ptq, which reads no texts.
auto-round rounds to the nearest code beside `int4`, and tunes by its recipe `light` (50 of its 200 iterations) beside
`--tune`. All calibrate on the same 128 documents of 512 tokens, or 16
with AWQ, with the other defaults of each tool. All outputs are then evaluated in one pass of `openquant eval`. What
WORK has already is not made again. Each process has one thread.
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import subprocess
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np

# Documents that calibrate. In AWQ there are fewer: llm-compressor runs parts of a layer on all of them 80 times.
ALL, FEWER = 128, 16
# By name, what openquant is asked for.
COMPARED = {
    "int4": "--scheme int4 --group-size 64",
    "int4-gptq": "--scheme int4 --group-size 64 --gptq",
    "int4-gptq-tune": "--scheme int4 --group-size 64 --gptq --tune",
    "int4-awq": f"--scheme int4 --group-size 64 --awq --samples {FEWER}",
    "int4-awq-gptq": f"--scheme int4 --group-size 64 --awq --gptq --samples {FEWER}",
    "nvfp4": "--scheme nvfp4",
    "nvfp4-gptq": "--scheme nvfp4 --gptq",
    "int3": "--scheme int3 --group-size 64",
    "int5": "--scheme int5 --group-size 64",
    "int6": "--scheme int6 --group-size 64",
}
MODEL_FREE = ("int3", "int5", "int6")


def main() -> None:
    """Make what is missing, and print the table; --run is what it runs llm-compressor with."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("directory", type=Path, help="what real_models.py fetched")
    parser.add_argument("--work", type=Path, required=True, help="where outputs and figures are kept")
    parser.add_argument("--peer", type=Path, help="an interpreter with llm-compressor and auto-round")
    parser.add_argument("--gptqmodel", type=Path, help="an interpreter with GPTQModel")
    parser.add_argument("--samples", type=int, default=12, help="documents of the evaluation")
    parser.add_argument("--length", type=int, default=256)
    parser.add_argument("--only", action="append", help="one of the comparisons")
    parser.add_argument("--run", nargs=3, help=argparse.SUPPRESS)
    options = parser.parse_args()
    source, work = options.directory / "smollm2-135m", options.work
    if options.run:
        tool, name, output = options.run
        if tool == "tokens":
            write_tokens(source, options.directory / "texts", int(name), Path(output))
        elif tool == "auto-round":
            auto_round(name, source, Path(output), work)
        elif tool == "gptqmodel":
            gptqmodel(source, Path(output), work)
        elif name in MODEL_FREE:
            model_free(int(name.removeprefix("int")), source, Path(output))
        else:
            llm_compressor(name, source, Path(output), work)
        return
    # Not at the top: llm-compressor runs without this directory on its path, as transformers would take the kernels.py
    # in it for the package of that name.
    from results import READS_TEXTS, TEXTS

    from calibration import measure

    texts = [part for name in TEXTS for part in ("--text", str(options.directory / "texts" / f"{name}.jsonl"))]
    work.mkdir(parents=True, exist_ok=True)
    for samples in (ALL, FEWER):
        if not tokens(work, samples).exists():
            # Not here: the peak memory of this process would be that of its children at least.
            itself = [sys.executable, __file__, str(options.directory), "--work", str(work)]
            subprocess.run([*itself, "--run", "tokens", str(samples), str(tokens(work, samples))], check=True)
    outputs = []
    for name, given in COMPARED.items():
        if options.only and name not in options.only:
            continue
        read = texts if any(option in given for option in READS_TEXTS) else []
        asked = ["compress", "-m", str(source), "-q", "--workers", "1", *shlex.split(given), *read]
        commands = {"openquant": [sys.executable, "-m", "openquant", *asked, "-o"]}
        if options.peer:
            itself = [str(options.peer), __file__, str(options.directory), "--work", str(work)]
            if "tune" not in name:
                commands["llm-compressor"] = [*itself, "--run", "llm-compressor", name]
            if name in ("int4", "int4-gptq-tune"):
                commands["auto-round"] = [*itself, "--run", "auto-round", name]
        if options.gptqmodel and name == "int4-gptq":
            itself = [str(options.gptqmodel), __file__, str(options.directory), "--work", str(work)]
            commands["gptqmodel"] = [*itself, "--run", "gptqmodel", name]
        for tool, command in commands.items():
            output = work / f"{tool}.{name}"
            outputs.append(output)
            if not (output / "measured.json").exists():
                print(f"{tool} {name}", file=sys.stderr, flush=True)
                measured = measure([*command, str(output)], work / "scratch", work / "log")
                (output / "measured.json").write_text(json.dumps(asdict(measured)))
    results = work / "eval.json"
    if not results.exists():
        (work / "prompts.txt").write_text("The capital of France is\n")
        size = ["--samples", str(options.samples), "--length", str(options.length)]
        given = [*map(str, outputs), "--source", str(source), *texts, *size, "--prompts", str(work / "prompts.txt")]
        subprocess.run([sys.executable, "-m", "openquant", "eval", *given, "--out", str(results)], check=True)
    print_table(json.loads(results.read_text()), work)


def tokens(work: Path, samples: int) -> Path:
    """The file of the tokens of so many documents."""
    return work / f"tokens-{samples}.json"


def write_tokens(source: Path, texts: Path, samples: int, into: Path) -> None:
    """The tokens that openquant calibrates on, as JSON lists."""
    from results import TEXTS

    from openquant.data.corpus import read_corpus
    from openquant.files.checkpoint import open_checkpoint
    from openquant.hub.source import find_source
    from openquant.options import CalibrationTexts
    from openquant.streaming.session import find_tokenizer

    tokenizer = find_tokenizer(find_source(str(source)), open_checkpoint(source))
    given = CalibrationTexts(text=tuple(str(texts / f"{name}.jsonl") for name in TEXTS), samples=samples)
    corpus = read_corpus(given, tokenizer, "calibration")
    into.write_text(json.dumps([list(document.ids) for document in corpus.documents]))


def llm_compressor(method: str, source: Path, output: Path, work: Path) -> None:
    """Quantize with llm-compressor, as its examples do; run by its own interpreter."""
    import torch
    from llmcompressor import oneshot
    from llmcompressor.modifiers.gptq import GPTQModifier
    from llmcompressor.modifiers.quantization import QuantizationModifier
    from llmcompressor.modifiers.transform.awq import AWQModifier
    from llmcompressor.pipelines.cache import IntermediatesCache
    from torch.utils.data import DataLoader
    from transformers import AutoModelForCausalLM, AutoTokenizer

    from openquant.streaming.model import products_in_float32

    weights: dict[str, Any] = {"num_bits": 4, "type": "int", "symmetric": True, "strategy": "group", "group_size": 64}
    number, *steps = method.split("-")
    scheme: dict[str, Any] = {"scheme": "NVFP4A16", "targets": "Linear"}
    if number == "int4":
        scheme = {"config_groups": {"group_0": {"targets": ["Linear"], "weights": weights}}}
    last = GPTQModifier if "gptq" in steps else QuantizationModifier
    recipe = [*([AWQModifier()] if "awq" in steps else []), last(ignore=["lm_head"], **scheme)]
    model = AutoModelForCausalLM.from_pretrained(source, dtype="auto")
    texts = [torch.tensor([ids]) for ids in json.loads(tokens(work, FEWER if "awq" in steps else ALL).read_text())]
    data = [{"input_ids": ids, "attention_mask": torch.ones_like(ids)} for ids in texts]
    # Its memory is pinned, which fails without an accelerator.
    IntermediatesCache.pin_memory = lambda *_: None  # type: ignore[method-assign]
    # Processors that do not multiply bfloat16 take eight times as long without this.
    with products_in_float32():
        # It asks for a processor, and does not use it.
        reads = {"dataset": DataLoader(data, batch_size=None), "processor": object()} if steps else {}
        oneshot(model=model, recipe=recipe, **reads)
    model.save_pretrained(output)
    AutoTokenizer.from_pretrained(source).save_pretrained(output)


def model_free(bits: int, source: Path, output: Path) -> None:
    """Quantize with llm-compressor file by file, which needs no class of the model; run by its own interpreter."""
    from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme
    from llmcompressor import model_free_ptq

    # Its presets W3A16, W5A16 and W6A16, in groups of 64 instead of 128.
    weights = QuantizationArgs(num_bits=bits, type="int", symmetric=True, strategy="group", group_size=64)
    # It quantizes every matrix that no pattern here names, of which it knows norms only.
    model_free_ptq(
        source,
        output,
        scheme=QuantizationScheme(targets=["Linear"], weights=weights),
        ignore=["lm_head", "re:.*embed_tokens"],
        device="cpu",
    )


def auto_round(method: str, source: Path, output: Path, work: Path) -> None:
    """Quantize with auto-round, in groups of 64, tuned or to the nearest code; run by the interpreter it is in."""
    import torch
    from auto_round import AutoRound
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model = AutoModelForCausalLM.from_pretrained(source, dtype="auto")
    tokenizer = AutoTokenizer.from_pretrained(source)
    settings: dict[str, Any] = {"scheme": "W4A16", "group_size": 64, "device_map": "cpu"}
    if method == "int4":
        # Without iterations it tunes nothing; with disable_opt_rtn it reads no texts.
        settings |= {"iters": 0, "disable_opt_rtn": True}
    else:
        texts = [torch.tensor([ids]) for ids in json.loads(tokens(work, ALL).read_text())]
        data = [{"input_ids": ids, "attention_mask": torch.ones_like(ids)} for ids in texts]
        settings |= {"iters": 50, "lr": 5e-3, "dataset": data, "nsamples": ALL, "seqlen": len(texts[0][0])}
        settings["enable_torch_compile"] = False
    AutoRound(model, tokenizer, **settings).quantize_and_save(output, format="auto_gptq")
    # It names a directory in it.
    [made] = output.iterdir()
    for path in made.iterdir():
        path.rename(output / path.name)
    made.rmdir()


def gptqmodel(source: Path, output: Path, work: Path) -> None:
    """Quantize with GPTQModel's GPTQ, in groups of 64; run by its own interpreter."""
    # It makes one more thread than it allows itself on two processors.
    os.environ["GPTQMODEL_CPU_WORKERS"] = "2"
    from gptqmodel import GPTQModel, QuantizeConfig

    texts = json.loads(tokens(work, ALL).read_text())
    model = GPTQModel.load(str(source), QuantizeConfig(bits=4, group_size=64, device="cpu"))
    model.quantize([{"input_ids": ids, "attention_mask": [1] * len(ids)} for ids in texts], batch_size=1)
    model.save(str(output))


def print_table(evaluation: dict[str, Any], work: Path) -> None:
    """Print figures of both tools by comparison, as Markdown, and KL ratios paired by document."""
    by_name = {output["output"]["name"]: output for output in evaluation["outputs"]}
    print("| format and method | tool | KL, nats | openquant's by its | size | CPU s | peak MB |")
    print("|---|---|---|---|---|---|---|")
    for name in COMPARED:
        for tool in ("openquant", "llm-compressor", "auto-round", "gptqmodel"):
            key = f"{tool}.{name}"
            if key not in by_name:
                continue
            output, ours = by_name[key], by_name[f"openquant.{name}"]
            measured = json.loads((work / key / "measured.json").read_text())
            low, high = output["kl"]["interval"]
            ratio = "" if tool == "openquant" else paired_ratio(ours, output)
            print(
                f"| {name} | {tool} | {output['kl']['mean']:.4f} [{low:.4f}, {high:.4f}] | {ratio} "
                f"| {output['sizes']['output'] / 1e6:.0f} MB | {measured['cpu']:.0f} | {measured['peak'] / 1e6:.0f} |"
            )


def paired_ratio(ours: dict[str, Any], theirs: dict[str, Any]) -> str:
    """Mean KL of ours over that of theirs, with the 95 % interval of a bootstrap over documents."""
    a, b = (np.array(output["kl_by_document"]) for output in (ours, theirs))
    drawn = np.random.default_rng(0).integers(0, len(a), (2000, len(a)))
    low, high = np.quantile(a[drawn].mean(1) / b[drawn].mean(1), (0.025, 0.975))
    return f"{a.mean() / b.mean():.2f} [{low:.2f}, {high:.2f}]"


if __name__ == "__main__":
    main()
