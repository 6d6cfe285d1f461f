"""GPUs are found by the names that people, drivers and shops give them."""

from __future__ import annotations

from openquant.formats.hardware import ENGINES_FOR, GPUS, HARDWARE, find_gpu, is_apple, nearest_gpus


def test_a_name_is_found_however_it_is_written() -> None:
    expected = {
        **{gpu.name: gpu.name for gpu in GPUS},
        "4090": "RTX 4090",
        "rtx-4090": "RTX 4090",
        "RTX4090": "RTX 4090",
        "NVIDIA GeForce RTX 4090": "RTX 4090",
        "4090 24GB": "RTX 4090",
        "3090ti": "RTX 3090 Ti",
        "4060-ti-16gb": "RTX 4060 Ti 16GB",
        "3060": "RTX 3060",
        "3060 12GB": "RTX 3060",
        "NVIDIA GeForce RTX 4060": "RTX 4060",
        "2060": "RTX 2060",
        "2080ti": "RTX 2080 Ti",
        "NVIDIA A100-SXM4-80GB": "A100-80",
        "a100 80gb pcie": "A100-80",
        "A100-40": "A100-40",
        "NVIDIA H100 80GB HBM3": "H100",
        "NVIDIA RTX 6000 Ada Generation": "RTX 6000 Ada",
        "NVIDIA RTX PRO 6000 Blackwell Server Edition": "RTX PRO 6000",
        "RTX A6000": "A6000",
        "AMD Instinct MI300X": "MI300X",
        "7900xtx": "RX 7900 XTX",
        "AMD Radeon RX 9070 XT": "RX 9070 XT",
        "AMD Radeon AI PRO R9700": "R9700",
        "cpu": "CPU",
        **dict.fromkeys(["", "409", "a100", "RTX 6000", "4060 Ti", "3060 8GB", "24GB", "m3-max"]),
    }
    found = {text: find_gpu(text) for text in expected}
    assert {text: gpu and gpu.name for text, gpu in found.items()} == expected


def test_no_two_gpus_have_one_name_and_each_has_what_engines_can_use() -> None:
    assert len({gpu.name for gpu in GPUS}) == len(GPUS)
    for gpu in GPUS:
        assert find_gpu(gpu.name) is gpu and gpu.hardware in HARDWARE
        # CUDA reports up to a tenth less than the advertised binary gigabytes; B200 is sold with 180 or 192.
        if gpu.gigabytes and gpu.memory:
            assert 0.9 < gpu.memory / (gpu.gigabytes * 2**30) < 1


def test_near_names_are_offered() -> None:
    assert nearest_gpus("4091")[0] == "RTX 4090"
    assert set(nearest_gpus("a100")) >= {"A100-40", "A100-80"}
    assert set(nearest_gpus("RTX 6000")) == {"RTX 6000 Ada", "RTX PRO 6000", "A6000"}
    assert nearest_gpus("radeon-vii-x") == ()
    assert set(nearest_gpus("Radeon RX 7900")) == {"RX 7900 XT", "RX 7900 XTX"}


def test_apple_is_recognized() -> None:
    for text in ("m3-max", "M4", "Apple", "MacBook", "m1 ultra"):
        assert is_apple(text) is True, text
    for text in ("MI300X", "m"):
        assert is_apple(text) is False, text


def test_engines_are_named_as_for_does() -> None:
    assert ENGINES_FOR == {"vllm": ("vLLM",), "sglang": ("SGLang",), "both": ("vLLM", "SGLang")}
