"""On which GPUs engines compute a scheme: one table for programs and for readers."""

from __future__ import annotations

import itertools
import subprocess
import sys

from conftest import ROOT
from openquant.formats.hardware import ENGINES, GENERATIONS, HARDWARE, KERNELS, arithmetic_on, find_kernel, schemes_on
from openquant.formats.schemes import SCHEMES


def test_engines_of_a_scheme_are_those_with_a_kernel_for_it():
    for scheme in SCHEMES.values():
        for experts, engines in ((False, scheme.engines), (True, scheme.expert_engines)):
            found = [
                engine
                for engine in ENGINES
                if any(find_kernel(engine, scheme.name, where, experts) for where in HARDWARE)
            ]
            assert found == [*engines], (scheme.name, experts)


def test_kernels_name_what_there_is_and_none_is_hidden_by_those_before_it():
    assert {kernel.engine for kernel in KERNELS} == {*ENGINES}
    assert {name for kernel in KERNELS for name in kernel.schemes} == {*SCHEMES}
    assert {where for kernel in KERNELS for where in kernel.hardware} == {*HARDWARE}
    asked = itertools.product(ENGINES, SCHEMES, HARDWARE, (False, True))
    assert {find_kernel(*question) for question in asked} - {None} == {*KERNELS}


def test_which_arithmetic_a_gpu_has():
    def found(engine, scheme, hardware, experts=False):
        kernel = find_kernel(engine, scheme, hardware, experts)
        return kernel and (kernel.arithmetic, kernel.in_hardware, kernel.needs)

    assert found("vLLM", "channel", "Ada") == ("FP8", True, None)
    assert found("vLLM", "channel", "Ampere") == ("16 bits", False, None)
    assert found("vLLM", "block", "Ada") == ("16 bits", False, None)
    assert found("vLLM", "block", "Ada", experts=True) == ("FP8", True, None)
    assert found("vLLM", "int6", "Hopper") == ("16 bits", False, "humming-kernels")
    assert found("vLLM", "int6", "MI300") is None
    assert found("vLLM", "nvfp4", "MI300") == ("emulated", False, None)
    assert found("vLLM", "nvfp4-w4a4", "Blackwell") == ("FP4", True, None)
    assert found("SGLang", "int8", "Hopper") == ("INT8", True, None)
    assert found("SGLang", "int8", "Hopper", experts=True) is None
    assert found("SGLang", "int4", "Turing") is None
    assert found("vLLM", "int4", None) is None


def test_schemes_that_engines_compute_on_a_gpu():
    assert "int6" in schemes_on(["vLLM"], "Ada") and "int6" not in schemes_on(ENGINES, "Ada")
    assert schemes_on(ENGINES, "Turing") == ()
    # No kernel of the CPU is for experts with a scale for each tensor or row in FP8.
    assert schemes_on(["vLLM"], "CPU", experts=True) == ("block", "int8", "int4")


def test_the_document_has_the_tables():
    printed = subprocess.run(
        [sys.executable, ROOT / "tools" / "hardware_tables.py"], capture_output=True, text=True, check=True
    ).stdout
    *tables, advice = printed.strip().split("\n\n")
    missing = [table for table in tables if table not in (ROOT / "docs" / "engines.md").read_text()]
    assert missing == []
    assert all(generation in printed for generation in GENERATIONS)
    for name in ("README.md", "docs/how-to/which-scheme.md"):
        assert advice in (ROOT / name).read_text(), name


def test_in_which_numbers_layers_are_multiplied_and_where():
    assert arithmetic_on("vLLM", [("channel", False)]) == {
        "FP8": ["Ada", "Hopper", "Blackwell", "MI300", "RDNA 4"],
        "16 bits": ["Turing", "Ampere"],
        "emulated": ["CPU"],
    }
    # Every layer must have a kernel, and the experts of FP8 have none on CPUs.
    mixed = [("channel", True), ("int4", False)]
    assert arithmetic_on("vLLM", mixed) == {
        "FP8 and 16 bits": ["Ada", "Hopper", "Blackwell", "MI300", "RDNA 4"],
        "16 bits": ["Turing", "Ampere"],
    }
    assert list(arithmetic_on("vLLM", [("int6", False)])) == ["16 bits with humming-kernels"]
    assert arithmetic_on("SGLang", [("int6", False)]) == {}
    assert arithmetic_on("SGLang", []) == {}
