"""Lists what a release of vLLM changed of all that this package rests on.

    python tools/compare_engines.py OLD NEW [--classes | --models | --formats | --lines] [--diff] [--move]

OLD and NEW are directories with a `vllm` in them: unpacked wheels, of which only .py files are read and none is run.

- classes: architectures that came, went or are built by another module; whether each has an entry or a reason
- models: per architecture with an entry, layers built (their class, quant_config, prefix, sizes), names of merged
  layers and of weights, and functions that load weights
- formats: per file of quantization, cache scales and kernels, functions and constants that changed, and what is newly
  called deprecated
- lines: per file of ours, cited lines (`models/falcon.py:407-436`) that changed. Lines that only moved are counted

`--diff` prints how each changed, `--move` rewrites cited lines that only moved. CONTRIBUTING.md says what to do
with each.
"""

from __future__ import annotations

import argparse
import ast
import difflib
import re
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from openquant.models import MODELS  # noqa: E402

TABLES = ("_TEXT_GENERATION_MODELS", "_MULTIMODAL_MODELS", "_TRANSFORMERS_SUPPORTED_MODELS")
REGISTRY = "model_executor/models/registry.py"
# Where the engine reads formats, stores scales and picks kernels.
FORMATS = (
    "model_executor/layers/quantization",
    "model_executor/kernels/linear",
    "model_executor/layers/attention",
    "model_executor/layers/fused_moe",
    "model_executor/layers/linear.py",
    "model_executor/layers/vocab_parallel_embedding.py",
    "model_executor/model_loader/weight_utils.py",
    "model_executor/model_loader/default_loader.py",
    "model_executor/models/config.py",
    "model_executor/models/utils.py",
    "config/cache.py",
)
# Of the two large ones of these, what formats rest on.
NARROWED = {
    "model_executor/layers/fused_moe": re.compile(r"layer|routed_experts|oracle|marlin|utils"),
    "model_executor/layers/quantization": re.compile(
        r"^(?!.*(quark|bitsandbytes|gguf|torchao|inc|cpu_wna16|moe_wna16)[./_])"
    ),
}
LAYERS = re.compile(r"Linear\w*|\w*LMHead|VocabParallelEmbedding|\w*FusedMoE\w*|\w*Attention|Mamba\w*Mixer\w*")
SAID = re.compile(
    r"packed_modules_mapping|stacked_params_mapping|hf_to_vllm_mapper|\w*mapper\w*|orig_to_new\w*|expert_params_mapping"
)
LOADS = re.compile(r"load_weights|_load_\w+|\w*weight_loader|get_expert_mapping|remap_\w+|maybe_remap\w*")


@dataclass(frozen=True)
class Tree:
    """One release's sources."""

    root: Path

    def files(self, under: str) -> Iterator[str]:
        """Names of .py files at or below a path, relative to the package."""
        base = self.root / under
        for path in sorted(base.rglob("*.py")) if base.is_dir() else [base]:
            if path.exists():
                yield path.relative_to(self.root).as_posix()

    def text(self, name: str) -> str:
        """A file's text; empty if there is none."""
        path = self.root / name
        return path.read_text() if path.is_file() else ""

    def classes(self) -> dict[str, str]:
        """The file or package that builds each architecture that generates text."""
        found: dict[str, str] = {}
        for statement in ast.parse(self.text(REGISTRY)).body:
            if isinstance(statement, ast.Assign) and getattr(statement.targets[0], "id", None) in TABLES:
                found |= {name: built[0] for name, built in ast.literal_eval(statement.value).items()}
        return {
            name: module.removeprefix("vllm.").replace(".", "/")
            if module.startswith("vllm.")
            else f"model_executor/models/{module}.py"
            for name, module in found.items()
        }


def bare(node: ast.AST) -> str:
    """Source of a node without its docstrings."""
    for inner in ast.walk(node):
        if isinstance(inner, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            first = inner.body[0]
            if isinstance(first, ast.Expr) and isinstance(first.value, ast.Constant) and len(inner.body) > 1:
                inner.body = inner.body[1:]
    return ast.unparse(node)


def units(text: str) -> dict[str, str]:
    """Functions, methods and constants of a file by name, each with its source."""
    found: dict[str, str] = {}

    def walk(body: list[ast.stmt], prefix: str) -> None:
        for node in body:
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                found[f"{prefix}{node.name}()"] = bare(node)
            elif isinstance(node, ast.ClassDef):
                found[f"class {prefix}{node.name}"] = ", ".join(map(ast.unparse, node.bases))
                walk(node.body, f"{prefix}{node.name}.")
            elif isinstance(node, ast.Assign | ast.AnnAssign):
                target = node.targets[0] if isinstance(node, ast.Assign) else node.target
                found[f"{prefix}{ast.unparse(target)}"] = ast.unparse(node)
            elif isinstance(node, ast.If | ast.Try):
                walk(node.body, prefix)

    walk(ast.parse(text).body, "")
    return found


def layers(text: str) -> dict[str, str]:
    """Layers that a model's file builds, its names of weights and what loads them, each with its source."""
    found: dict[str, str] = {}

    def visit(node: ast.AST, owner: str) -> None:
        for child in ast.iter_child_nodes(node):
            inner = owner
            if isinstance(child, ast.ClassDef):
                inner = child.name
            elif isinstance(child, ast.FunctionDef) and LOADS.fullmatch(child.name):
                found[f"{owner}.{child.name}()"] = bare(child)
                continue
            elif isinstance(child, ast.Assign | ast.AnnAssign) and child.value is not None:
                target = ast.unparse(child.targets[0] if isinstance(child, ast.Assign) else child.target)
                builds = isinstance(child.value, ast.Call) and (
                    LAYERS.fullmatch(ast.unparse(child.value.func).rsplit(".", 1)[-1])
                    or any(word.arg == "quant_config" for word in child.value.keywords)
                )
                if builds or SAID.fullmatch(target.rsplit(".", 1)[-1]):
                    key = f"{owner}: {target}"
                    found[key] = "\n".join(filter(None, (found.get(key), ast.unparse(child))))
                    continue
            visit(child, inner)

    visit(ast.parse(text), "")
    return found


def compare(before: dict[str, str], after: dict[str, str], diff: bool) -> Iterator[str]:
    """A line for each name that came, went or changed, and how if that is asked."""
    for name in sorted({*before, *after}):
        old, new = before.get(name), after.get(name)
        if old == new:
            continue
        mark = "+" if old is None else "-" if new is None else "~"
        yield f"  {mark} {name}"
        if diff and old is not None and new is not None:
            lines = difflib.unified_diff(old.splitlines(), new.splitlines(), lineterm="", n=1)
            yield from (f"      {line}" for line in list(lines)[2:])
        elif diff and new is not None and len(new) < 2000:
            yield from (f"      {line}" for line in new.splitlines())


def compare_classes(old: Tree, new: Tree) -> Iterator[str]:
    """Architectures that came, went or moved."""
    reasons = {
        line.split("  ", 1)[0] for line in (ROOT / "tests" / "not_covered.txt").read_text().splitlines() if "  " in line
    }
    before, after = old.classes(), new.classes()
    for name in sorted({*before, *after}):
        settled = "entry" if name in MODELS else "reason" if name in reasons else "NEITHER ENTRY NOR REASON"
        if name not in before:
            yield f"  + {name} ({after[name]}): {settled}"
        elif name not in after:
            yield f"  - {name} ({before[name]}): {settled}"
        elif before[name] != after[name]:
            yield f"  ~ {name}: {before[name]} -> {after[name]}: {settled}"


def compare_models(old: Tree, new: Tree, diff: bool) -> Iterator[str]:
    """What builds an architecture that has an entry, file by file."""
    classes = new.classes()
    built: dict[str, list[str]] = {}
    for name in MODELS:
        if name in classes:
            for file in new.files(classes[name]):
                built.setdefault(file, []).append(name)
    # And what these import of one another.
    for file in new.files("model_executor/models"):
        built.setdefault(file, ["no entry by itself"])
    for file in sorted(built):
        before, after = old.text(file), new.text(file)
        if before and before != after:
            lines = list(compare(layers(before), layers(after), diff))
            if lines:
                yield f"{file}: {', '.join(built[file])}"
                yield from lines


def compare_formats(old: Tree, new: Tree, diff: bool) -> Iterator[str]:
    """What reads formats, file by file."""
    for under in FORMATS:
        for file in sorted({*old.files(under), *new.files(under)}):
            if under in NARROWED and not NARROWED[under].search(file.removeprefix(under)):
                continue
            before, after = old.text(file), new.text(file)
            if before == after:
                continue
            if not before or not after:
                yield f"{file}: {'new' if after else 'gone'}"
                continue
            lines = list(compare(units(before), units(after), diff))
            known = {line.strip() for line in before.splitlines()}
            lines += [
                f"  ! {line.strip()}"
                for line in after.splitlines()
                if "deprecat" in line.lower() and line.strip() not in known
            ]
            if lines:
                yield file
                yield from lines


# Where a path that is cited may begin.
BASES = (
    "",
    "model_executor",
    "model_executor/layers",
    "model_executor/layers/quantization",
    "model_executor/layers/quantization/utils",
)
# A path with lines, which may be broken after a slash, or further lines of the last one, which may follow the first.
CITED = re.compile(
    r"((?:[\w.]+/(?:\n\s*#?\s*)?)*\w+\.py)(?::(\d+)(?:-(\d+))?)?|(?<=[\s(]):(\d+)(?:-(\d+))?"
    r"|(?<=\d)(?:,| and) (\d{2,})(?:-(\d+))?(?=[,:;).\s])"
)
# With a version where that is not the one of openquant/version.py.
ENGINES = re.compile(
    r"\b(vLLM|VLLM|SGLang|SGLANG|transformers|compressed-tensors|GPTQModel|mcore-bridge|Megatron-Bridge)\b"
    r"(?: (\d[\d.]*\d))?"
)


@dataclass(frozen=True)
class Citation:
    """Lines of an engine's file that a file of ours names.

    Attributes:
        engine: as the text says it before the path; None if it does not.
        version: of the engine, where the text says it.
        path: the file as it is cited.
        lines: first and last; None where only the file is cited.
        spans: where in our text each number lies.
    """

    engine: str | None
    version: str | None
    path: str
    lines: tuple[int, int] | None
    spans: tuple[tuple[int, int], ...]


def citations(text: str) -> Iterator[Citation]:
    """What a text cites, in order."""
    path, end = None, 0
    for match in CITED.finditer(text):
        if match[1]:
            path = re.sub(r"\n\s*#?\s*", "", match[1])
        # Any number after a comma would be one.
        if path is None or (match[6] and match.start() != end):
            continue
        end = match.end()
        groups = next(((i, i + 1) for i in (2, 4, 6) if match[i]), None)
        before = text[max(0, match.start() - 600) : match.start()].rsplit("\n\n", 1)[-1]
        engine, version = (ENGINES.findall(before) or [(None, None)])[-1]
        if groups is None:
            yield Citation(engine, version or None, path, None, ())
        else:
            given = [i for i in groups if match[i]]
            first, last = int(match[given[0]]), int(match[given[-1]])
            spans = tuple(match.span(i) for i in given)
            yield Citation(engine, version or None, path, (first, last), spans)


def resolve(tree: Tree, path: str) -> str | None:
    """The file that a cited path stands for, relative to the package."""
    path = path.removeprefix("vllm/")
    for base in BASES:
        name = f"{base}/{path}".lstrip("/")
        if (tree.root / name).is_file():
            return name
    ends = [name for name in tree.files("") if name.endswith(f"/{path}")]
    return ends[0] if len(ends) == 1 else None


def mover(before: list[str], after: list[str]) -> Callable[[int], int | None]:
    """Where each line of a file lies in another version of it, counted from 1; None for one that changed."""
    moved: dict[int, int] = {}
    for block in difflib.SequenceMatcher(None, before, after, autojunk=False).get_matching_blocks():
        moved |= {block.a + i + 1: block.b + i + 1 for i in range(block.size)}
    return moved.get


def compare_lines(old: Tree, new: Tree, diff: bool, move: bool) -> Iterator[str]:
    """What our files cite that changed, and how many lines only moved."""

    @cache
    def moved(name: str) -> Callable[[int], int | None]:
        return mover(old.text(name).splitlines(), new.text(name).splitlines())

    ours = [*(ROOT / "openquant").rglob("*.py"), *(ROOT / "docs").glob("*.md"), *(ROOT / "tests").rglob("*.py")]
    same = shifted = 0
    for source in sorted([*ours, ROOT / "tests" / "not_covered.txt"]):
        text, edits, lines = source.read_text(), [], []
        for cited in citations(text):
            if cited.engine not in (None, "vLLM", "VLLM") or cited.version or cited.lines is None:
                continue
            name = resolve(old, cited.path)
            where = f"{cited.path}:{'-'.join(map(str, dict.fromkeys(cited.lines)))}"
            if name is None:
                if cited.engine:
                    lines.append(f"  ? {where} is no file of the old release")
                continue
            if not new.text(name):
                lines.append(f"  - {where}: the file is gone")
                continue
            first, last = cited.lines
            places = [moved(name)(line) for line in range(first, last + 1)]
            there = [place for place in places if place is not None]
            if len(there) < len(places) or there[-1] - there[0] != last - first:
                lines.append(f"  ~ {where} changed")
                if diff:
                    lines += [f"      - {line}" for line in old.text(name).splitlines()[first - 1 : last]]
                    span = (min(there), max(there)) if there else (0, 0)
                    lines.append(f"      = now {span[0]}-{span[1]}")
                    lines += [f"      + {line}" for line in new.text(name).splitlines()[max(span[0] - 1, 0) : span[1]]]
            elif there[0] == first:
                same += 1
            else:
                shifted += 1
                numbers = (there[0], there[-1])
                edits += [(span, str(number)) for span, number in zip(cited.spans, numbers, strict=False)]
        if lines:
            yield source.relative_to(ROOT).as_posix()
            yield from lines
        if move and edits:
            for (start, end), number in sorted(edits, reverse=True):
                text = text[:start] + number + text[end:]
            source.write_text(text)
    yield f"{same} cited places are the same, {shifted} only moved{' and were rewritten' if move else ''}"


def main() -> None:
    """Compare two releases."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("old", type=Path)
    parser.add_argument("new", type=Path)
    for part in ("classes", "models", "formats", "lines"):
        parser.add_argument(f"--{part}", action="store_true")
    parser.add_argument("--diff", action="store_true", help="how each changed")
    parser.add_argument("--move", action="store_true", help="rewrite cited lines that only moved")
    options = parser.parse_args()
    old, new = (Tree(path / "vllm") for path in (options.old, options.new))
    for tree in (old, new):
        if not (tree.root / REGISTRY).is_file():
            parser.error(f"{tree.root} has no {REGISTRY}: unpack a wheel of vllm there")
    parts: dict[str, Callable[[], Iterator[str]]] = {
        "classes": lambda: compare_classes(old, new),
        "models": lambda: compare_models(old, new, options.diff),
        "formats": lambda: compare_formats(old, new, options.diff),
        "lines": lambda: compare_lines(old, new, options.diff, options.move),
    }
    chosen = [part for part in parts if getattr(options, part)] or list(parts)
    for part in chosen:
        print(f"== {part}")
        for line in parts[part]():
            print(line)


if __name__ == "__main__":
    main()
