"""How long an evaluation is said to take."""

from __future__ import annotations

import pytest

from openquant.measure import work
from openquant.measure.work import LOGIT, WEIGHT, Work, spoken


def test_products_logits_and_weights_are_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(work, "_speed", lambda _: 1e9)
    found = Work(nbytes=2_000_000, itemsize=2, vocabulary=1000, passes=4, outputs=1).seconds(100, "cpu")
    # Two operations for each of a million weights and each token, four times; three pairs of logits.
    assert found == pytest.approx(2 * 1e6 * 100 * 4 / 1e9 + LOGIT * 1000 * 100 * 3 + WEIGHT * 1e6)


def test_a_processor_has_some_speed() -> None:
    assert 1e8 < work._speed("cpu") < 1e15


@pytest.mark.parametrize(
    ("seconds", "said"),
    [(0.2, "1 second"), (89, "89 seconds"), (91, "2 minutes"), (3000, "50 minutes"), (9000, "2.5 hours")],
)
def test_times_are_said_to_people(seconds: float, said: str) -> None:
    assert spoken(seconds) == said
