"""Every option, once: its name, its type, its default and its text.

An option is a field. `--help`, shell completion and the docstrings of `compress()` and the other functions show the
text of that field: `--help` its first sentence, docstrings all of it. Options that several commands share are mixins.

    Recipe(scheme="block", ignore=["lm_head"])
    Run("Qwen/Qwen3-8B", dry_run=True, max_memory="2GB")

A new option is a field here; fields.py says what a field has, and cli/arguments.py has the few options that only the
command line knows. `tools/stub.py` writes signatures for editors.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import KW_ONLY, MISSING, dataclass
from pathlib import Path

from .errors import UsageError
from .fields import (
    EXECUTION,
    FILES,
    HUB,
    OUTPUT,
    QUANTIZATION,
    TEXTS,
    OptionGroup,
    directory_option,
    docstring_lines,
    file_option,
    flags_of,
    option,
    options_of,
    pattern_and_scheme,
    quantization,
    same_as,
    size,
    tokens,
)
from .formats.hardware import (
    GGUF,
    KEPT,
    SCHEME_NAMES,
    UNCHANGED,
    ActivationScheme,
    CacheScheme,
    FormatName,
    ScaleFormat,
    SchemeName,
)
from .version import CITED

# Seconds that ranks wait for each other, as long as torchrun waits for its nodes.
PATIENCE: float = 600

# More texts than these are a mistake, and would fill the memory before anything is computed.
MAX_SAMPLES = 100_000
MAX_LENGTH = 1 << 20

DEVICES = r"auto|cpu|cuda(:\d+)?"


# Mixins: options that several commands share.


@dataclass(frozen=True)
class ModelSource(OptionGroup):
    """Where the model comes from."""

    model: str | os.PathLike[str] = option(
        MISSING,
        "Model directory, GGUF file, or Hub org/name[@rev].",
        FILES,
        "MODEL",
        flags=("-m", "--model"),
        common=True,
        required=True,
        completes="directory",
    )
    _: KW_ONLY
    revision: str | None = option(None, "Branch, tag or commit of the Hub repository.", FILES, "REV")


@dataclass(frozen=True)
class ModelDirectory(OptionGroup):
    """A quantized checkpoint on disk."""

    directory: str | os.PathLike[str] = option(
        MISSING, "Directory of a quantized checkpoint.", FILES, "DIR", completes="directory"
    )


@dataclass(frozen=True, kw_only=True)
class Streaming(OptionGroup):
    """How much of a Hub repository lies on disk."""

    stream: bool = option(
        False,
        "Keep only a few shards of a Hub repo on disk. None of them stays in the Hub's cache.",
        FILES,
        common=True,
    )


@dataclass(frozen=True, kw_only=True)
class ScratchDirectory(OptionGroup):
    """Where temporary files lie."""

    scratch: str | os.PathLike[str] | None = directory_option(
        None,
        "Scratch directory (default: beside the output). It holds temporary files and streamed shards. The default is "
        "the working directory for diagnose, and if no output is a directory.",
        EXECUTION,
        "DIR",
    )


@dataclass(frozen=True, kw_only=True)
class Device(OptionGroup):
    """On which device it is computed."""

    device: str = option(
        "cpu",
        'Where to compute: cpu (default), cuda, cuda:N, auto. "auto" uses a GPU if there is one.',
        EXECUTION,
        "NAME",
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if not re.fullmatch(DEVICES, self.device):
            raise UsageError(f"{self.device} is not a device", "choose auto, cpu, cuda or cuda:N")


@dataclass(frozen=True, kw_only=True)
class Memory(OptionGroup):
    """How much memory it may use."""

    max_memory: int | None = option(
        None,
        "Memory limit of this process, such as 2GB. A number is in bytes. If the limit is too low for one step, the "
        "run stops with an error before it starts. A conversion uses fewer threads to stay below the limit. A forward "
        "pass writes hidden states that do not fit to a temporary file.",
        EXECUTION,
        "SIZE",
        read=size,
        common=True,
    )


@dataclass(frozen=True, kw_only=True)
class Workers(OptionGroup):
    """How many threads work."""

    workers: int | None = option(
        None,
        "Number of threads (default: available CPUs). compress and dequantize divide the CPUs by the number of ranks "
        "on this machine. All but verify use at most 16 by default, and compress 4 with a GPU.",
        EXECUTION,
        "N",
        read=int,
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.workers is not None and self.workers < 1:
            raise UsageError(f"{self.workers} workers cannot work", "give --workers 1 or more")


@dataclass(frozen=True)
class Texts(OptionGroup):
    """The texts that run through a model."""

    text: Sequence[str | os.PathLike[str]] = file_option(
        (),
        "Text file or JSON Lines file (repeatable). Each file is one domain. Each line of a .jsonl file has `text` or "
        "`messages`; every other file is text in UTF-8. Default: openquant's own prose, code, chats and ten languages. "
        "A calibration and an evaluation never read the same parts of a text.",
        TEXTS,
        "FILE",
        repeated=True,
        common=True,
    )
    dataset: str | None = option(
        None,
        "Dataset: NAME[:SUBSET[:SPLIT]] or a directory. The name is that of a Hub dataset. It must have a column "
        "`text` or `messages`, and only as much of it as is needed is read.",
        TEXTS,
        "NAME",
    )
    samples: int = option(16, "Number of text samples.", TEXTS, "N", read=int)
    length: int = option(512, "Tokens per sample.", TEXTS, "N", read=int)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.text and self.dataset:
            raise UsageError("--text and --dataset are both given", "give one of them")
        if not 1 <= self.samples <= MAX_SAMPLES:
            raise UsageError(f"{self.samples} samples", f"give --samples from 1 to {MAX_SAMPLES:,}")
        if not 2 <= self.length <= MAX_LENGTH:
            raise UsageError(f"samples of {self.length} tokens", f"give --length from 2 to {MAX_LENGTH:,}")
        if self.samples < len(self.names):
            raise UsageError(
                f"--samples {self.samples} is fewer than the {len(self.names)} texts: {', '.join(self.names)}",
                f"give --samples {len(self.names)} or more",
            )

    @property
    def names(self) -> list[str]:
        """Names of the texts that are given: of files their paths if several have the same name."""
        if self.dataset:
            return [self.dataset]
        paths = list(map(Path, self.text))
        names = [path.name for path in paths]
        if len(set(names)) < len(names):
            return list(map(str, paths))
        return names


@dataclass(frozen=True)
class CalibrationTexts(Texts):
    """The texts of a calibration, which are more."""

    samples: int = same_as(Texts, "samples", default=128)


# What each command takes.


@dataclass(frozen=True)
class Recipe(OptionGroup):
    """How a checkpoint is quantized."""

    scheme: SchemeName = quantization(
        "tensor",
        f"Numeric format and scales: {', '.join(SCHEME_NAMES)}, {UNCHANGED} or {KEPT}. "
        + "".join(f'"{name}": {named.stored}. ' for name, named in SCHEME_NAMES.items())
        + f'"{UNCHANGED}": the weights stay as they are, and only KV-cache scales are added. '
        f'"{KEPT}": codes and scales of a quantized source stay as they are, and are written as compressed-tensors.',
        choices=(*SCHEME_NAMES, UNCHANGED, KEPT),
        common=True,
    )
    format: FormatName | None = quantization(
        None,
        "Checkpoint format: fp8 or compressed-tensors. Default: fp8 for the schemes that have it, tensor and block, "
        "and compressed-tensors for all others.",
        choices=("fp8", "compressed-tensors"),
    )
    scale_format: ScaleFormat | None = quantization(
        None,
        "Scale format: float, or ue8m0 (powers of two). ue8m0 rounds scales up. The scheme block in the fp8 format "
        "has both, and float by default; mxfp8 and mxfp4 have only ue8m0, all other schemes only float.",
        choices=("float", "ue8m0"),
    )
    activation_scheme: ActivationScheme = quantization(
        "dynamic",
        "Activation scales: dynamic (default) or static. Only the scheme tensor has static activation scales. They "
        "come from a calibration file, or from the input_scale tensors of a quantized source; if there are neither, "
        "a calibration runs first.",
        choices=("dynamic", "static"),
    )
    calibration: str | os.PathLike[str] | None = file_option(
        None,
        "Calibration file that calibrate wrote. It must be of this model. It is used for static activation scales, "
        "the activation scales of nvfp4-w4a4, the scales of an FP8 KV cache, `smooth` and `awq`.",
        QUANTIZATION,
        "FILE",
    )
    calibrate: bool = quantization(
        False,
        "Run a calibration before the model is quantized. Static activation scales, `smooth` and `awq` imply it if "
        "there is no calibration file; static activation scales do not if the source has them.",
    )
    smooth: float | None = quantization(
        None,
        "SmoothQuant exponent for int8, such as 0.5. The inputs of layers are divided by factors, and the columns of "
        "their weights are multiplied by the same factors. The factors are powers of two that come from a calibration. "
        "The division is part of the norms and projections before these layers.",
        "ALPHA",
        read=float,
    )
    awq: bool = quantization(
        False,
        "Use AWQ for int2 to int7. The inputs of layers are divided as with `smooth`, by AWQ's factors, where this "
        "lowers the error of the layers' outputs. The search for scales weighs the error of each column by its "
        "activations, which come from a calibration.",
        common=True,
    )
    gptq: bool = quantization(
        False,
        "Use GPTQ, which runs texts through the model. GPTQ rounds a weight column by column with the layer's "
        "Hessian: each column compensates for the rounding errors of the columns before it. An expert uses the tokens "
        "that are routed to it.",
        common=True,
    )
    tune: bool = quantization(
        False,
        "Weigh tokens and outputs by gradients in `gptq`. What the model's answers depend on counts more, which loses "
        "less. Gradients run back through the model first, which takes longer than GPTQ itself. Experts count all "
        "tokens alike. It needs numba.",
        common=True,
    )
    kv_cache: CacheScheme = quantization(
        "auto",
        'KV cache: fp8 adds its scales, auto (default) none. With "fp8", engines store the KV cache in FP8. Its scales '
        "come from a calibration or a quantized source; if there are neither, they are 1. They are for fp8_e4m3: vLLM "
        "refuses --kv-cache-dtype fp8_e5m2 for an output that has them, and for any in the fp8 format.",
        choices=("fp8", "auto"),
        explains=False,
    )
    group_size: str | None = quantization(
        None,
        "int2-int7 group: 32, 64, 128 (default), channel. Each group of inputs shares a scale; a group of "
        '"channel" is a whole row.',
        "N",
        choices=("32", "64", "128", "channel"),
    )
    asymmetric: bool = quantization(
        False,
        "Store a zero point with each int2 to int7 scale. This lowers the rounding error. transformers "
        f"{CITED['transformers']} cannot load such a checkpoint.",
    )
    no_search: bool = quantization(
        False,
        "Do not search for scales (int2-int7, nvfp4). Each scale then comes from the largest weight of its group, not "
        "from a search for the least squared error.",
    )
    ignore: Sequence[str] = quantization(
        (),
        "Modules that stay unquantized (repeatable). These are patterns over module names: * matches one part of a "
        "name, ** any number of parts, {a,b} a or b.",
        "PATTERN",
        repeated=True,
        common=True,
    )
    scheme_for: Mapping[str, SchemeName] | None = quantization(
        None,
        "Another scheme for matching modules (repeatable). It maps patterns over module names to schemes; the first "
        "pattern that matches counts. It needs the compressed-tensors format. Schemes: "
        f"{', '.join(name for name, named in SCHEME_NAMES.items() if named.mixes)}.",
        "PATTERN=SCHEME",
        read=pattern_and_scheme,
        repeated=True,
    )
    tp: int | None = quantization(
        None,
        "Tensor-parallel size that the output must allow. Layers that 128x128 blocks do not divide at this size get "
        "one scale per output row instead; in the fp8 format they stay unquantized.",
        "N",
        read=int,
    )
    quantize_lm_head: bool = quantization(
        False,
        "Quantize the output head (compressed-tensors). Engines load none in the fp8 format, and vLLM serves a model "
        "that has one neither as an embedding model nor as a reranker.",
    )
    quantize_embeddings: bool = quantization(
        False,
        "Quantize the input embedding, for vLLM. It loads int8-weights, int4 and int2; beside another scheme the "
        "embedding gets int8-weights. No engine loads one that is the output head too.",
    )
    architecture: str | None = quantization(
        None,
        "Registry entry to use instead of config.json's. "
        '"generic" decides by names and shapes, and so does "auto" for a class without an entry.',
        "NAME",
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.scheme_for is not None and not isinstance(self.scheme_for, Mapping):
            # Of equal patterns the first counts, as of any that match.
            schemes: dict[str, SchemeName] = {}
            for pattern, scheme in self.scheme_for:
                schemes.setdefault(pattern, scheme)
            object.__setattr__(self, "scheme_for", schemes)
        if not all(isinstance(text, str) for pair in (self.scheme_for or {}).items() for text in pair):
            raise UsageError("scheme_for has what is no text", "give names of schemes by patterns")
        if self.calibrate and self.calibration is not None:
            raise UsageError("--calibrate and --calibration are both given", "give one of them")
        if self.scheme in _OF_UNCHANGED:
            self._require_unchanged()

    def _require_unchanged(self) -> None:
        """Refuse options that say how weights are stored: with this scheme they stay as they are."""
        for name, known in options_of(type(self)).items():
            given = getattr(self, name) or known.default
            if name not in _OF_UNCHANGED[self.scheme] and given != known.default:
                flag = flags_of(name, known)[0]
                raise UsageError(
                    f"--scheme {self.scheme} leaves weights as they are, and {flag} is given", "leave one of them out"
                )
        if self.scheme == UNCHANGED and self.kv_cache == "auto":
            raise UsageError(
                f"--scheme {UNCHANGED} leaves weights as they are, and nothing else is asked for",
                "give --kv-cache fp8 too, for KV-cache scales, or choose another scheme",
            )


# Options that go with what leaves weights as they are.
_OF_UNCHANGED = {
    UNCHANGED: ("scheme", "kv_cache", "calibration", "calibrate", "tp", "architecture"),
    KEPT: ("scheme", "kv_cache", "tp", "architecture"),
}


@dataclass(frozen=True)
class Push:
    """Where and how a model is published on the Hub."""

    name: str = option(
        MISSING,
        "Hub repository to push to, created if missing. It is `org/name`, or `name` in your own namespace.",
        HUB,
        "NAME",
        flags=("--push-to-hub",),
        common=True,
    )
    private: bool = option(False, "If the repository is created, make it private, as a private source does.", HUB)
    create_pr: bool = option(False, "Open a pull request instead of committing to main.", HUB)
    message: str | None = option(
        None,
        "Message of the commit, or the pull request's title. Default: the model's.",
        HUB,
        "TEXT",
        flags=("--commit-message",),
    )
    only: bool = option(False, "Delete each shard of the output once it is pushed.", HUB, flags=("--push-only",))
    replace_weights: bool = option(
        False,
        "Replace source or unquantized weights on main. Without it, a commit to a main branch that has the "
        "source's weights, or unquantized ones, is refused.",
        HUB,
    )


def push_target(given: object) -> Push:
    """Return where to push to.

    Args:
        given: a Push, or the name of a repository.

    Raises:
        UsageError: it is neither.
    """
    if isinstance(given, str):
        return Push(given)
    if not isinstance(given, Push):
        raise UsageError(f"push is of type {type(given).__name__}, not a name or a Push", 'give "org/name"')
    return given


@dataclass(frozen=True)
class Run(Memory, Workers, Device, Streaming, ModelSource):
    """What compress() and dequantize() read and write, and how they run."""

    output: str | os.PathLike[str] | None = option(
        None,
        "Output directory (default: ./NAME-FP8 or similar). By default it is in the working directory, or beside the "
        "model if that is the model's own. Its name is that of the model with the suffix of the scheme: "
        f"{', '.join(f'`{named.suffix}` for {name}' for name, named in SCHEME_NAMES.items())}. tensor and block add "
        "`-CT` in the compressed-tensors format, block adds `-UE8M0` with ue8m0 scales, static activation scales add "
        "`-static`, and the scales of an FP8 KV cache `-KV8`.",
        FILES,
        "DIR",
        flags=("-o", "--output"),
        also=("--out",),
        common=True,
        completes="directory",
    )
    dry_run: bool = option(False, "Print the plan and write nothing.", EXECUTION, common=True)
    overwrite: bool = option(False, "Replace what an earlier run wrote to the output.", FILES)
    copy: Sequence[str] = option(
        (),
        "More files to copy, such as 'prompts/*'. Copied anyway is what engines, transformers and readers of the card "
        "look for; of hidden files only .gitattributes is.",
        FILES,
        "PATTERN",
        repeated=True,
    )
    push: Push | None = option(None, "Publish the output on the Hub. A text is the name of the repository.")

    def __post_init__(self) -> None:
        super().__post_init__()
        if str(self.output).endswith(".gguf"):
            raise UsageError(f"{self.output} would be a directory, and no GGUF file", GGUF)
        if self.push is not None:
            object.__setattr__(self, "push", push_target(self.push))


def _require_context(context: int) -> None:
    if context < 1:
        raise UsageError(f"a context of {context} tokens holds nothing", "give --context 8k or more")


def _scheme_names(given: Sequence[str]) -> tuple[str, ...]:
    names = tuple(name.strip() for text in given for name in text.split(","))
    if len(set(names)) < len(names):
        raise UsageError("--candidates names a scheme twice", "name each once")
    return names


@dataclass(frozen=True, kw_only=True)
class FitOptions(OptionGroup):
    """The size that compress() chooses schemes for."""

    fit: str | None = quantization(
        None,
        "Mix schemes to fit a size: 4090, 5.0bits, kl=0.02. 24GB, 2x24GB, 4090 or 2x4090 are GPUs, with room for a KV "
        "cache of `context` tokens; size=12.5GB is the size of all weights, 5.0bits the bits of a weight, and kl=0.02 "
        "the largest KL divergence. docs/fit.md says how the mixture is chosen.",
        "SIZE",
        common=True,
    )
    context: int = option(8192, "Tokens of KV cache, for --fit", QUANTIZATION, "N", read=tokens)
    engines: str = quantization(
        "both",
        "Engine for --fit: vllm, sglang, or both (default). SGLang loads fewer schemes than vLLM.",
        flags=("--for",),
        choices=("vllm", "sglang", "both"),
    )
    candidates: Sequence[str] = quantization(
        (),
        "Schemes that --fit may choose, separated by commas. Without it: int4, nvfp4, int5, int6 and int8-weights, as "
        "far as engines load them.",
        "SCHEMES",
        repeated=True,
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        _require_context(self.context)
        object.__setattr__(self, "candidates", _scheme_names(self.candidates))
        if self.fit is None and (self.context, self.engines, self.candidates) != (8192, "both", ()):
            raise UsageError("--context, --for and --candidates are for --fit", "give --fit too, or leave them out")


@dataclass(frozen=True)
class CompareSchemes(ModelSource):
    """What fit_table() compares."""

    gpu: str | None = quantization(
        None,
        "GPU: 4090, 2xA100-80, 24GB, or cpu. Without one, the table is for GPUs of 24, 48 and 80 GB. docs/fit.md lists "
        "the names.",
        "NAME",
    )
    context: int = same_as(FitOptions, "context", help="Tokens of a sequence.")
    engines: str | None = same_as(
        FitOptions, "engines", default=None, help="Engines that must load it: vllm, sglang, both. Default: any."
    )
    kv_cache: CacheScheme = same_as(
        Recipe, "kv_cache", help="KV cache of the output: fp8, auto (default). An FP8 one holds twice as many tokens."
    )
    ignore: Sequence[str] = same_as(Recipe, "ignore")
    quantize_lm_head: bool = same_as(Recipe, "quantize_lm_head")
    quantize_embeddings: bool = same_as(Recipe, "quantize_embeddings")
    architecture: str | None = same_as(Recipe, "architecture")

    def __post_init__(self) -> None:
        super().__post_init__()
        _require_context(self.context)


@dataclass(frozen=True)
class Search(Memory, Device, Streaming, CompareSchemes):
    """What search_mixtures() measures."""

    candidates: Sequence[str] = same_as(FitOptions, "candidates", help="Schemes to mix, separated by commas.")
    text: Sequence[str | os.PathLike[str]] = same_as(Texts, "text")
    dataset: str | None = same_as(Texts, "dataset")

    def __post_init__(self) -> None:
        super().__post_init__()
        object.__setattr__(self, "candidates", _scheme_names(self.candidates))


@dataclass(frozen=True)
class Calibrate(ScratchDirectory, Memory, Device, Streaming, ModelSource):
    """What calibrate() reads and writes, and how it runs."""

    out: str | os.PathLike[str] | None = file_option(
        None,
        "File to write (default: ./NAME.calibration.safetensors). If the working directory is the model's own, the "
        "default is beside it. An earlier calibration of the same model is replaced.",
        FILES,
        "FILE",
        flags=("-o", "--out"),
        also=("--output",),
    )
    overwrite: bool = option(False, "Also replace a calibration of another model.", FILES)


@dataclass(frozen=True)
class Diagnose(ScratchDirectory, Workers, Streaming, ModelSource):
    """What diagnose() measures."""

    scheme: SchemeName = option(
        "tensor", "Scheme to compare the others with.", QUANTIZATION, "NAME", choices=tuple(SCHEME_NAMES)
    )
    ignore: Sequence[str] = same_as(Recipe, "ignore")
    architecture: str | None = same_as(Recipe, "architecture")


def _task_names(task: str | os.PathLike[str]) -> list[str | os.PathLike[str]]:
    """Return the tasks of a value of --tasks: a file, which may have a comma in its name, or names."""
    # Path.exists() raises if all names together are longer than the name of a file may be.
    if not isinstance(task, str) or os.path.exists(task):  # noqa: PTH110
        return [task]
    return [*task.split(",")]


@dataclass(frozen=True)
class Evaluate(ScratchDirectory, Memory, Device, Streaming):
    """What evaluate() compares, and how."""

    outputs: Sequence[str | os.PathLike[str]] = directory_option(
        MISSING, "Directories or Hub repositories made from the source.", FILES, "OUTPUT", repeated=True
    )
    source: str | os.PathLike[str] = directory_option(
        MISSING, "Source checkpoint: directory or Hub repository.", FILES, "MODEL", required=True
    )
    out: str | os.PathLike[str] | None = file_option(
        None,
        "File for the results of all outputs. By default those of an output are in its eval.json, if it is a directory "
        "that openquant wrote; others are not stored.",
        FILES,
        "FILE",
    )
    prompts: str | os.PathLike[str] | None = file_option(
        None,
        "File of prompts: one per line, or JSON Lines. The source and the outputs answer them side by side. Default: "
        "built-in prompts. With `stream` none are answered.",
        TEXTS,
        "FILE",
    )
    no_prompts: bool = option(False, "Answer no prompts, not even the built-in ones.", TEXTS)
    kv_cache: CacheScheme = same_as(
        Recipe,
        "kv_cache",
        help='KV cache: fp8, or auto (default), as the config says. "fp8" rounds keys and values to FP8; "auto" does '
        "so for an output whose config says it.",
        group=EXECUTION,
    )
    tasks: Sequence[str | os.PathLike[str]] = file_option(
        (),
        "Tasks, separated by commas: files, or names of lm-eval. A file is JSON Lines with `question`, `choices` and "
        "`answer`, the JSON of a BIG-bench task, or the YAML of an lm-eval task. Names and YAML need lm-eval, the "
        "extra `tasks`. Tasks that generate texts are for lm-eval itself (docs/tasks.md).",
        TEXTS,
        "TASK",
        repeated=True,
    )
    limit: int | None = option(
        None, "Questions of each task that are asked (default: all). They are the first ones.", TEXTS, "N", read=int
    )
    seed: int = option(0, "Seed of the noise floor and the intervals.", EXECUTION, "N", read=int)
    fail_above: float | None = option(
        None, "Exit with 1 if a mean KL divergence is larger. From Python this does nothing.", OUTPUT, "KL", read=float
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.outputs:
            raise UsageError("no output is named", "give a directory that was made from the source")

        object.__setattr__(self, "tasks", tuple(name for task in self.tasks for name in _task_names(task)))
        if self.limit is not None and not self.tasks:
            raise UsageError("--limit is for --tasks", "give --tasks too, or leave --limit out")
        if self.limit is not None and self.limit < 1:
            raise UsageError(f"{self.limit} questions", "give --limit 1 or more")

        if self.no_prompts and self.prompts is not None:
            raise UsageError("--prompts gives prompts to answer, --no-prompts answers none", "give one of them")
        if self.stream and self.prompts is not None:
            raise UsageError(
                "--prompts takes all weights once more, which --stream has let go of by then", "give one of them"
            )

        if not 0 <= self.seed < 1 << 32:
            raise UsageError(f"{self.seed} is no seed", f"give --seed from 0 to {(1 << 32) - 1:,}")


@dataclass(frozen=True)
class Check(Workers, ModelDirectory):
    """What verify() checks."""

    directory: str | os.PathLike[str] = same_as(
        ModelDirectory, "directory", help="Directory of a quantized checkpoint, or Hub org/name[@rev]."
    )
    source: str | os.PathLike[str] | None = directory_option(
        None, "Source to compare with: a directory, GGUF file, or Hub org/name[@rev].", FILES, "MODEL"
    )
    full: bool = option(
        False,
        "Also decode every layer (needs --source). Each layer's error is measured against the source, and the source "
        "is quantized again.",
        EXECUTION,
    )
    architecture: str | None = same_as(Recipe, "architecture")


@dataclass(frozen=True)
class Explain(OptionGroup):
    """The layer to explain."""

    layer: str = option(
        MISSING, "Module name, or a pattern as in --ignore. A name may end in `.weight`.", FILES, "LAYER"
    )


# The only of these classes that `openquant` exports.
Push.__doc__ = f"{Push.__doc__}\n\nAttributes:\n{docstring_lines(options_of(Push))}"
