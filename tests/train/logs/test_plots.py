"""Pictures of a run."""

import pytest
from matplotlib.figure import Figure
from PIL import Image

from train.logs import report


@pytest.fixture
def drawn(monkeypatch):
    """The figures that are saved."""
    figures = []
    save = Figure.savefig

    def kept(figure, *args, **named):
        figures.append(figure)
        save(figure, *args, **named)

    monkeypatch.setattr(Figure, "savefig", kept)
    return figures


def losses(*values):
    return [{"step": step, "loss": loss} for step, loss in enumerate(values)]


@pytest.mark.parametrize(
    ("values", "scale"),
    [
        ((3.0, 2.0, 1.0), "linear"),
        ((3.0, 0.3, 0.03), "log"),
        ((3.0, float("nan"), 2.0), "linear"),
        ((3.0, None, 0.1), "log"),
        ((3.0, 0.0), "linear"),
        ((float("inf"),), "linear"),
    ],
)
def test_axis_is_logarithmic_where_the_loss_spans_a_decade(tmp_path, drawn, values, scale):
    report.plot_loss(losses(*values), tmp_path / "loss.png")
    (axes,) = drawn[0].axes
    assert axes.get_yscale() == scale


def test_accuracy_has_a_panel_of_its_own(tmp_path, drawn):
    rows = losses(3.0, 2.0, 1.0)
    rows[1] |= {"held_out_loss": 2.5, "held_out_accuracy": 0.25}
    rows[2] |= {"held_out_loss": None, "held_out_accuracy": 0.5}
    report.plot_loss(rows, tmp_path / "loss.png")
    above, below = drawn[0].axes
    assert [list(line.get_ydata()) for line in above.lines] == [[3.0, 2.0, 1.0], [2.5]]
    assert list(below.lines[0].get_xdata()) == [1, 2]
    assert list(below.lines[0].get_ydata()) == [25.0, 50.0]
    with Image.open(tmp_path / "loss.png") as picture:
        assert picture.height > picture.width * 0.9
