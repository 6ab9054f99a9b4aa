"""The sampling and integration examples, with the umbridge client and a server."""

import xml.etree.ElementTree as ET
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from dragoman.plugins import import_file

EXAMPLES = Path(__file__).parents[4] / "examples"
MODELS = EXAMPLES / "scientific"
ServeModel = Callable[[Any], str]


def test_the_stiffness_of_the_beam_is_sampled_in_two_ways(
    serve_model: ServeModel, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    sample: Any = import_file(EXAMPLES / "sample_beam.py")
    url = serve_model(str(MODELS / "posterior"))
    density = sample.Density(url)
    mode, spread = sample.peak(density, np.zeros(sample.MODES))
    assert np.abs(density.gradient(mode)).max() < 1e-6
    assert density(mode + 0.3 * spread[:, 0]) < density(mode)
    chains = sample.main(url, str(tmp_path / "beam.svg"), count=100)
    assert "hamiltonian" in capsys.readouterr().out
    deviations = np.sqrt(np.diag(spread @ spread.T))
    for samples in chains.values():
        assert np.abs((samples.mean(axis=0) - mode) / deviations).max() < 2.5
    moves = np.abs(np.diff(chains["hamiltonian"], axis=0)).max(axis=1) > 0
    assert moves.mean() > 0.5  # most proposals are accepted, so the gradients are those of the density
    plot = ET.parse(tmp_path / "beam.svg").getroot()
    assert "mode 4" in "".join(plot.itertext())


def test_the_temperature_of_the_rod_is_integrated(serve_model: ServeModel, tmp_path: Path) -> None:
    integrate: Any = import_file(EXAMPLES / "integrate_heat.py")
    url = serve_model(str(MODELS / "heat"))
    mean, error = integrate.main(url, str(tmp_path / "heat.svg"), points=8)
    assert (np.diff(mean[: integrate.CELLS]) > 0).all()
    assert error.max() < 0.05
    # Of 512 points: 0.8988 +- 0.0021 and 0.5032 +- 0.0018.
    assert mean[integrate.CELLS - 1] == pytest.approx(0.8988, abs=6 * error[integrate.CELLS - 1] + 0.01)
    assert mean[integrate.CELLS] == pytest.approx(0.5032, abs=6 * error[integrate.CELLS] + 0.01)
    assert ET.parse(tmp_path / "heat.svg").getroot().tag.endswith("svg")
