"""The table "Beside other tools" of docs/results.md: openquant, llm-compressor and auto-round on one model.

    python benchmarks/real_models.py DIR
    python -m venv DIR/peers
    DIR/peers/bin/pip install torch==2.13.0 llmcompressor==0.14.0.1 auto-round==0.15.1
    python benchmarks/peers.py DIR --peer DIR/peers/bin/python --work WORK

All write the same formats: INT4 in groups of 64, symmetric, and NVFP4 weights, which is 4.25 and 4.5 bits a weight.
All calibrate on the same 128 documents of 512 tokens, with the other defaults of each tool. All outputs are then
evaluated in one pass of `openquant eval`. What WORK has already is not made again. Each process has one thread.
"""

from __future__ import annotations

import argparse
import json
import shlex
import subprocess
import sys
from collections.abc import Iterable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np

# By name of the comparison, what openquant is asked for, and which methods of the peers answer it.
COMPARED = {
    "int4": ("--scheme int4 --group-size 64", ("llm-compressor", "auto-round-rtn")),
    "int4-gptq": ("--scheme int4 --group-size 64 --gptq", ("llm-compressor", "auto-round")),
    "int4-awq": ("--scheme int4 --group-size 64 --awq", ("llm-compressor",)),
    "int4-awq-gptq": ("--scheme int4 --group-size 64 --awq --gptq", ("llm-compressor", "auto-round")),
    "nvfp4": ("--scheme nvfp4", ("llm-compressor",)),
    "nvfp4-gptq": ("--scheme nvfp4 --gptq", ("llm-compressor",)),
}
# auto-round's own quick setting: 200 steps a layer take hours on two cores.
AUTO_ROUND_STEPS = 50


def main() -> None:
    """Make what is missing, and print the table; --run is what it runs the peers with."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("directory", type=Path, help="what real_models.py fetched")
    parser.add_argument("--work", type=Path, required=True, help="where outputs and figures are kept")
    parser.add_argument("--peer", type=Path, help="an interpreter with llm-compressor and auto-round")
    parser.add_argument("--samples", type=int, default=24, help="documents of the evaluation")
    parser.add_argument("--length", type=int, default=256)
    parser.add_argument("--only", action="append", help="one of the comparisons")
    parser.add_argument("--run", nargs=3, help=argparse.SUPPRESS)
    options = parser.parse_args()
    source, work = options.directory / "smollm2-135m", options.work
    if options.run:
        tool, method, output = options.run
        if tool == "llm-compressor":
            llm_compressor(method, source, Path(output), work)
        else:
            auto_round(AUTO_ROUND_STEPS if tool == "auto-round" else 0, source, Path(output), work)
        return
    # Not at the top: peers run without this directory on their path, as transformers would take its kernels.py for the
    # package of that name.
    from results import READS_TEXTS, TEXTS

    from calibration import measure

    texts = [part for name in TEXTS for part in ("--text", str(options.directory / "texts" / f"{name}.jsonl"))]
    work.mkdir(parents=True, exist_ok=True)
    if not (work / "tokens.json").exists():
        write_tokens(source, texts[1::2], work / "tokens.json")
    outputs = []
    for name, (given, peers) in COMPARED.items():
        if options.only and name not in options.only:
            continue
        read = texts if any(option in given for option in READS_TEXTS) else []
        asked = ["compress", "-m", str(source), "-q", "--workers", "1", *shlex.split(given), *read]
        commands = {"openquant": [sys.executable, "-m", "openquant", *asked, "-o"]}
        for peer in peers if options.peer else ():
            itself = [str(options.peer), __file__, str(options.directory), "--work", str(work)]
            commands[peer] = [*itself, "--run", peer, name]
        for tool, command in commands.items():
            output = work / f"{tool}.{name}" if tool != "auto-round" else work / "auto-round.int4"
            outputs.append(output)
            if not (output / "measured.json").exists():
                print(f"{tool} {name}", file=sys.stderr, flush=True)
                measured = measure([*command, str(output)], work / "scratch", work / "log")
                (output / "measured.json").write_text(json.dumps(asdict(measured)))
    outputs = list(dict.fromkeys(outputs))
    results = work / "eval.json"
    if not results.exists():
        (work / "prompts.txt").write_text("The capital of France is\n")
        size = ["--samples", str(options.samples), "--length", str(options.length)]
        given = [*map(str, outputs), "--source", str(source), *texts, *size, "--prompts", str(work / "prompts.txt")]
        subprocess.run([sys.executable, "-m", "openquant", "eval", *given, "--out", str(results)], check=True)
    print_table(json.loads(results.read_text()), work)


def write_tokens(source: Path, texts: Iterable[str], into: Path) -> None:
    """The tokens that openquant calibrates on, as JSON lists."""
    from openquant.data.corpus import read_corpus
    from openquant.files.checkpoint import open_checkpoint
    from openquant.hub.source import find_source
    from openquant.options import CalibrationTexts
    from openquant.streaming.session import find_tokenizer

    tokenizer = find_tokenizer(find_source(str(source)), open_checkpoint(source))
    corpus = read_corpus(CalibrationTexts(text=tuple(texts)), tokenizer, "calibration")
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

    from openquant.streaming.matmul import products_in_float32

    weights: dict[str, Any] = {"num_bits": 4, "type": "int", "symmetric": True, "strategy": "group", "group_size": 64}
    number, *steps = method.split("-")
    scheme: dict[str, Any] = {"scheme": "NVFP4A16", "targets": "Linear"}
    if number == "int4":
        scheme = {"config_groups": {"group_0": {"targets": ["Linear"], "weights": weights}}}
    last = GPTQModifier if "gptq" in steps else QuantizationModifier
    recipe = [*([AWQModifier()] if "awq" in steps else []), last(ignore=["lm_head"], **scheme)]
    model = AutoModelForCausalLM.from_pretrained(source, dtype="auto")
    texts = [torch.tensor([ids]) for ids in json.loads((work / "tokens.json").read_text())]
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


def auto_round(steps: int, source: Path, output: Path, work: Path) -> None:
    """Quantize to INT4 with auto-round, tuned in some steps a layer or only rounded; run by its own interpreter."""
    import torch
    from auto_round import AutoRound
    from torch.utils.data import DataLoader
    from transformers import AutoModelForCausalLM, AutoTokenizer

    from openquant.streaming.matmul import products_in_float32

    texts = [torch.tensor(ids) for ids in json.loads((work / "tokens.json").read_text())]
    data = [{"input_ids": ids, "attention_mask": torch.ones_like(ids)} for ids in texts]
    tokenizer = AutoTokenizer.from_pretrained(source)
    model = AutoModelForCausalLM.from_pretrained(source, dtype="auto")
    with products_in_float32():
        rounder = AutoRound(
            model,
            tokenizer=tokenizer,
            scheme="W4A16",
            group_size=64,
            sym=True,
            dataset=DataLoader(data, batch_size=8),
            device_map="cpu",
            iters=steps,
            nsamples=len(texts),
            seqlen=512,
        )
        rounder.quantize_and_save(str(output), format="llm_compressor")
    # It makes a directory in there, named after model and scheme.
    [made] = output.iterdir()
    for file in list(made.iterdir()):
        file.rename(output / file.name)
    made.rmdir()


def print_table(evaluation: dict[str, Any], work: Path) -> None:
    """Print figures of all tools by comparison, as Markdown, and KL ratios paired by document."""
    by_name = {output["output"]["name"]: output for output in evaluation["outputs"]}
    print("| format and method | tool | KL, nats | openquant's / its | size | CPU s | peak MB |")
    print("|---|---|---|---|---|---|---|")
    for name, (_, peers) in COMPARED.items():
        for tool in ("openquant", *peers):
            key = f"{tool}.{name}" if tool != "auto-round" else "auto-round.int4"
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
