"""The picture of several outputs: where points lie, which are on the frontier, and that the legend has every name."""

from __future__ import annotations

import itertools
from typing import Any

import matplotlib
import pytest
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle
from matplotlib.text import Annotation

from openquant.report.charts import STYLE, by_kl, draw_comparison, on_frontier
from support.evaluation_files import evaluation

SIZES = [(10.5, 4.8), (8.0, 4.2), (4.4, 4.4)]
# Bytes and KL as measured on a model of 135 million weights: two groups in which points nearly lie on each other.
MEASURED = {
    "mxfp4": (113e6, 0.608), "int4": (115e6, 0.581), "int4-gptq": (115e6, 0.295), "nvfp4": (116.4e6, 0.189),
    "nvfp4-w4a4": (116.4e6, 0.375), "int4-g32": (116.4e6, 0.368), "tensor": (162.8e6, 0.0411),
    "channel": (163.4e6, 0.0427), "int8": (163.4e6, 0.0471), "int8-weights": (163.1e6, 0.00625),
    "mxfp8": (166e6, 0.0403),
}  # fmt: skip


def evaluations(figures: dict[str, tuple[float, float]], floor: float = 0.003) -> list[dict[str, Any]]:
    found = []
    for name, (nbytes, kl) in figures.items():
        one = evaluation()
        one["kl"] |= {"mean": kl, "interval": [0.9 * kl, 1.1 * kl]}
        one["sizes"] = {"source": 269_000_000, "output": int(nbytes)}
        one["floor"]["kl"], one["output"]["name"] = floor, name
        found.append(one)
    return found


def drawn(of: list[dict[str, Any]], size: tuple[float, float] = SIZES[0]) -> Axes:
    with matplotlib.rc_context(STYLE):
        figure = Figure(size, layout="constrained")
        axes = figure.add_subplot()
        draw_comparison(axes, of)
    return axes


def points(axes: Axes) -> list[tuple[float, float]]:
    """The markers, in pixels from the left and from the bottom."""
    marked = [line for line in axes.lines if line.get_marker() == "o"]
    return [tuple(axes.transData.transform(line.get_xydata()[0])) for line in marked]


def legend(axes: Axes) -> list[str]:
    """The texts of the legend."""
    found = axes.get_legend()
    assert found is not None
    return [text.get_text() for text in found.get_texts()]


def test_points_lie_farther_right_the_larger_and_higher_the_farther_from_the_source() -> None:
    of = by_kl(evaluations(MEASURED))
    axes = drawn(list(reversed(of)))  # type: ignore[arg-type]
    found = points(axes)
    assert len(found) == len(MEASURED)
    figures = [(one["sizes"]["output"], one["kl"]["mean"]) for one in of]
    for (one, at), (other, there) in itertools.combinations(zip(figures, found, strict=True), 2):
        for axis in (0, 1):
            assert (one[axis] < other[axis]) == (at[axis] < there[axis] - 1e-6)
    # Equal factors are equal lengths.
    assert axes.get_yscale() == "log"
    low, high = axes.transData.transform([(1e8, 0.01), (1e8, 0.1)])[:, 1]
    assert axes.transData.transform((1e8, 1.0))[1] - high == pytest.approx(high - low)


def test_the_floor_is_a_band_below_which_nothing_is_told_apart() -> None:
    axes = drawn(evaluations(MEASURED))
    assert axes.patches
    for band in axes.patches:
        assert isinstance(band, Rectangle)
        assert band.get_y() == axes.get_ylim()[0]
        assert band.get_y() + band.get_height() == pytest.approx(0.003)
    assert legend(axes)[:2] == [
        "floor: the source with bfloat16's noise",
        "frontier: no other output is smaller and closer",
    ]
    assert not drawn(evaluations(MEASURED, 0.0)).patches


def test_the_frontier_joins_outputs_than_which_none_is_smaller_and_closer() -> None:
    of = evaluations(MEASURED)
    best = {one["output"]["name"] for one, good in zip(of, on_frontier(of), strict=True) if good}
    assert best == {"mxfp4", "int4-gptq", "nvfp4", "tensor", "int8-weights"}
    axes = drawn(of)
    [line] = [line for line in axes.lines if line.get_drawstyle() == "steps-post"]
    corners = [tuple(corner) for corner in line.get_xydata()]
    assert corners == sorted(corners)
    assert [kl for _, kl in corners] == [0.608, 0.295, 0.189, 0.0411, 0.00625]
    # Points of the same figures do not rule each other out.
    assert on_frontier(evaluations({"a": (5, 0.1), "b": (5, 0.1), "c": (5, 0.2), "d": (6, 0.1)})) == [
        True, True, False, False,
    ]  # fmt: skip


def test_each_point_has_the_number_of_its_name_in_the_legend() -> None:
    axes = drawn(evaluations(MEASURED))
    of = by_kl(evaluations(MEASURED))
    assert legend(axes)[2:] == [f"{number}: {one['output']['name']}" for number, one in enumerate(of, 1)]
    numbers = [text for text in axes.texts if isinstance(text, Annotation)]
    assert [text.get_text() for text in numbers] == [str(number) for number in range(1, len(of) + 1)]
    assert [text.xy for text in numbers] == [(one["sizes"]["output"], one["kl"]["mean"]) for one in of]


def test_outputs_that_are_alike_or_equal_to_the_source_are_in_the_picture() -> None:
    axes = drawn(evaluations({"one": (5, 0.0), "other": (5, 0.0), "third": (5, 0.1)}))
    assert legend(axes)[-3:] == ["1: one, KL 0", "2: other, KL 0", "3: third"]
    low, high = axes.get_ylim()
    assert 0 < low < high
    for height in (line.get_xydata()[0][1] for line in axes.lines if line.get_marker() == "o"):
        assert low < height < high
    assert legend(drawn(evaluations({"a": (0, 0.0), "b": (0, 0.0)}, 0.0)))[-2:] == ["1: a, KL 0", "2: b, KL 0"]
