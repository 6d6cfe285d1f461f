"""tools/compare_engines.py: what it says of two releases of vLLM, here of a few lines each."""

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
REGISTRY = "model_executor/models/registry.py"
OTHERS = "_MULTIMODAL_MODELS = {}\n_TRANSFORMERS_SUPPORTED_MODELS = {}\n"


def release(root: Path, classes: str, fp8: str, model: str) -> Path:
    for name, text in {
        REGISTRY: f"_TEXT_GENERATION_MODELS = {{{classes}}}\n{OTHERS}",
        "model_executor/layers/quantization/fp8.py": fp8,
        "model_executor/models/llama.py": model,
    }.items():
        path = root / "vllm" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return root


@pytest.fixture
def releases(tmp_path: Path) -> tuple[Path, Path]:
    known = '"LlamaForCausalLM": ("llama", "LlamaForCausalLM")'
    return (
        release(tmp_path / "old", known, "def limit():\n    return 64\n", "a = 1\nb = 2\nc = 3\n"),
        release(
            tmp_path / "new",
            known + ', "NobodyForCausalLM": ("nobody", "NobodyForCausalLM")',
            "def limit():\n    return 128\n",
            "import x\n\na = 1\nb = 2\nc = 4\n",
        ),
    )


def copied(tmp_path: Path) -> Path:
    """The package and the tools, which look for what is cited beside them."""
    copy = tmp_path / "copy"
    for name in ("openquant", "tools"):
        shutil.copytree(ROOT / name, copy / name, ignore=shutil.ignore_patterns("__pycache__"))
    (copy / "tests").mkdir()
    (copy / "tests" / "not_covered.txt").write_text("")
    return copy


def run(tool: Path, releases: tuple[Path, Path], *options: str) -> str:
    done = subprocess.run([sys.executable, str(tool), *map(str, releases), *options], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_a_class_without_entry_or_reason_is_named(releases: tuple[Path, Path]) -> None:
    found = run(ROOT / "tools" / "compare_engines.py", releases, "--classes")
    assert found == "== classes\n  + NobodyForCausalLM (model_executor/models/nobody.py): NEITHER ENTRY NOR REASON\n"


def test_cited_lines_are_rewritten_where_they_only_moved(releases: tuple[Path, Path], tmp_path: Path) -> None:
    """In a copy of the repository, of which a comment cites two lines."""
    copy = copied(tmp_path)
    comment = copy / "openquant" / "cited.py"
    comment.write_text("# vLLM models/llama.py:2 adds.\n\n# vLLM models/llama.py:3 is another.\n")
    found = run(copy / "tools" / "compare_engines.py", releases, "--lines", "--move")
    assert "openquant/cited.py\n  ~ models/llama.py:3 changed\n" in found
    assert found.splitlines()[-1] == "0 cited places are the same, 1 only moved and were rewritten"
    assert comment.read_text() == "# vLLM models/llama.py:4 adds.\n\n# vLLM models/llama.py:3 is another.\n"
