"""When clients of a model that is not ready may ask again."""

import pickle

import pytest

from dragoman.core.errors import NotReady
from dragoman.core.spec import ModelSpec
from dragoman.engine import deployment as deployments
from dragoman.engine.deployment import Deployment
from dragoman.protocols.wire import error_headers


@pytest.mark.parametrize(("loading_s", "header"), [(0.0, "1"), (0.9, "1"), (4.2, "5"), (8.0, "8"), (600.0, "10")])
def test_clients_of_a_model_that_loads_wait_as_long_as_it_has_been_loading(
    monkeypatch: pytest.MonkeyPatch, loading_s: float, header: str
) -> None:
    now_s = 100.0
    monkeypatch.setattr(deployments, "monotonic", lambda: now_s)
    deployment = Deployment(ModelSpec(name="m"), lambda: None)
    now_s += loading_s
    assert error_headers(deployment.not_ready()) == (("retry-after", header),)


def test_a_model_that_failed_to_load_has_no_estimate(monkeypatch: pytest.MonkeyPatch) -> None:
    now_s = 100.0
    monkeypatch.setattr(deployments, "monotonic", lambda: now_s)
    deployment = Deployment(ModelSpec(name="m"), lambda: None)
    deployment.state = "UNAVAILABLE"
    now_s += 60
    assert error_headers(deployment.not_ready()) == (("retry-after", "1"),)


def test_the_time_survives_the_way_between_processes() -> None:
    error = pickle.loads(pickle.dumps(NotReady("m", 7.0)))
    assert (error.message, error.retry_after_s) == ("m", 7.0)
