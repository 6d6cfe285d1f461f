"""What devices compute with."""

from __future__ import annotations

import pytest

from openquant.convert.conversion import TorchKernels
from openquant.errors import UsageError


def test_what_a_device_refuses_is_explained() -> None:
    with pytest.raises(UsageError) as caught:
        TorchKernels("cpu:0").memory(1 << 60)
    assert caught.value.message.startswith("cpu:0 failed: ")
    assert "\n" not in caught.value.message
    assert caught.value.hint == "use fewer --workers, or --device cpu"
