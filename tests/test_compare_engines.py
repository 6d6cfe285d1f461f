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


def test_a_changed_limit_of_a_format_is_shown(releases: tuple[Path, Path]) -> None:
    found = run(ROOT / "tools" / "compare_engines.py", releases, "--formats", "--diff")
    assert "model_executor/layers/quantization/fp8.py" in found
    assert "-    return 64" in found
    assert "+    return 128" in found


def test_cited_lines_are_rewritten_where_they_only_moved(releases: tuple[Path, Path], tmp_path: Path) -> None:
    """In a copy of the repository, of which a comment cites two lines."""
    copy = copied(tmp_path)
    comment = copy / "openquant" / "cited.py"
    comment.write_text("# vLLM models/llama.py:2 adds.\n\n# vLLM models/llama.py:3 is another.\n")
    found = run(copy / "tools" / "compare_engines.py", releases, "--lines", "--move")
    assert "openquant/cited.py\n  ~ models/llama.py:3 changed\n" in found
    assert found.splitlines()[-1] == "0 cited places are the same, 1 only moved and were rewritten"
    assert comment.read_text() == "# vLLM models/llama.py:4 adds.\n\n# vLLM models/llama.py:3 is another.\n"


def test_further_lines_of_a_file_move_too(releases: tuple[Path, Path], tmp_path: Path) -> None:
    """What follows a cited line at once; other numbers, and lines of a version that is named, stay."""
    lines = [f"x{number} = {number}" for number in range(60)]
    for release, text in zip(releases, (lines, ["import x", "", *lines]), strict=True):
        (release / "vllm" / "model_executor" / "models" / "config.py").write_text("\n".join(text) + "\n")
    copy = copied(tmp_path)
    comment = copy / "openquant" / "cited.py"
    written = (
        "# vLLM config.py:{} and {} read it, like :{}, {} and {}-{}.\nSIZES = (24, 48)\n# vLLM 0.1.0 config.py:20.\n"
    )
    comment.write_text(written.format(56, 17, 12, 13, 14, 15))
    found = run(copy / "tools" / "compare_engines.py", releases, "--lines", "--move")
    assert found.endswith("\n0 cited places are the same, 5 only moved and were rewritten\n")
    assert comment.read_text() == written.format(58, 19, 14, 15, 16, 17)


def test_a_directory_without_vllm_is_refused(releases: tuple[Path, Path], tmp_path: Path) -> None:
    tool = ROOT / "tools" / "compare_engines.py"
    done = subprocess.run([sys.executable, str(tool), str(releases[0]), str(tmp_path)], capture_output=True, text=True)
    assert done.returncode == 2
    assert f"{tmp_path}/vllm has no {REGISTRY}: unpack a wheel of vllm there" in done.stderr
