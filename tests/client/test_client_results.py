"""How results and clients show themselves, in a terminal and in notebooks."""

import re
import zlib
from base64 import b64decode
from typing import Any, assert_type

import numpy as np
import pytest
from numpy.typing import NDArray

import dragoman
from dragoman import BYTES, Tensor, errors
from dragoman.client.results import Result
from dragoman.core.tensor import object_array
from dragoman.formats.message import InferenceResponse


def result(labels: Any = None, **arrays: Any) -> Result:
    tensors = {name: value if isinstance(value, Tensor) else Tensor.of(value) for name, value in arrays.items()}
    return Result(InferenceResponse.of(tensors, model_name="m", model_version="2"), labels=labels)


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (np.array([[-10.0]]), "FP64[1, 1] [[-10.]]"),
        (np.array([0.1, 1 / 3], np.float32), "FP32[2] [0.1, 0.333333]"),
        (np.arange(1000), "INT64[1000] [0, 1, ..., 998, 999]"),
        (np.array(0.25), "FP64[] 0.25"),
        (np.array(7, np.int8), "INT8[] 7"),
        (np.array([True]), "BOOL[1] [True]"),
        (np.empty((0, 3)), "FP64[0, 3]"),
        (object_array([b"a", b"\xff"], (2,)), r"BYTES[2] ['a', b'\xff']"),
        (object_array([b"x" * 100], (1,)), f"BYTES[1] ['{'x' * 58}…]"),
    ],
)
def test_values_are_shown_in_one_line(value: Any, text: str) -> None:
    assert repr(result(y=value)) == f"<Result of m: y: {text}>"


def test_many_elements_are_shortened() -> None:
    assert repr(result(y=object_array([b"a"] * 20, (20,)))).count("'a'") == 8


def test_html_is_a_table_and_escaped() -> None:
    html = result(**{"<i>": object_array([b"<script>"], (1,))})._repr_html_()
    assert "<script>" not in html
    assert "<i>" not in html
    assert "&lt;script&gt;" in html
    assert "&lt;i&gt;" in html
    assert "BYTES" in html


def bars(html: str) -> list[tuple[str, str]]:
    """Return label and value of each bar."""
    labels = re.findall(r"<title>(.*?)</title>", html)
    return list(zip(labels, re.findall(r">([-\d.e+]+)</text>", re.sub(r"<title>.*?</text>", "", html)), strict=True))


def test_probabilities_are_bars_with_labels() -> None:
    scores = np.array([[0.1, 0.7, 0.2]])
    assert bars(result(y=scores)._repr_html_()) == [("1", "0.7"), ("2", "0.2"), ("0", "0.1")]
    html = result({"y": ("cat", "<dog>", "cow")}, y=scores)._repr_html_()
    assert bars(html) == [("&lt;dog&gt;", "0.7"), ("cow", "0.2"), ("cat", "0.1")]
    many = result(y=np.full((1, 50), 0.02))._repr_html_()
    assert len(bars(many)) == 5
    assert "and 45 more" in many


@pytest.mark.parametrize(
    "value", [np.array([[5.1, 3.5]]), np.array([[0.5, np.nan]]), np.array([3, 4]), np.ones((1, 1))]
)
def test_other_numbers_are_digits(value: Any) -> None:
    assert "<svg" not in result(y=value)._repr_html_()


def test_numbers_are_plotted_on_request() -> None:
    found = result(y=np.array([[5.1, -3.5], [1, 2]]), x=np.ones(1)).plot()
    assert bars(found._repr_html_()) == [("0", "5.1"), ("1", "-3.5"), ("1", "2"), ("0", "1")]
    assert re.findall(r"<div>(row \d)</div>", found._repr_html_()) == ["row 0", "row 1"]
    with pytest.raises(errors.InvalidInput, match="nothing to plot"):
        result(x=np.ones(1)).plot()
    with pytest.raises(KeyError):
        result(x=np.ones(1)).plot("z")


def pixels_of(html: str) -> Any:
    """Return the pixels of the first PNG, which has no filters."""
    match = re.search(r"data:image/png;base64,([^\"]+)", html)
    assert match is not None
    file = b64decode(match[1])
    assert file.startswith(b"\x89PNG\r\n\x1a\n")
    width, height = (int.from_bytes(file[at : at + 4], "big") for at in (16, 20))
    channels = {0: 1, 2: 3, 6: 4}[file[25]]
    size = int.from_bytes(file[33:37], "big")
    lines = np.frombuffer(zlib.decompress(file[41 : 41 + size]), np.uint8).reshape(height, 1 + width * channels)
    return lines[:, 1:].reshape(height, width, channels)


@pytest.mark.parametrize("channels", [1, 3, 4])
def test_images_are_shown(channels: int) -> None:
    pixels = (np.arange(9 * 11 * channels) % 256).astype(np.uint8).reshape(1, 9, 11, channels)
    np.testing.assert_array_equal(pixels_of(result(y=pixels)._repr_html_()), pixels[0])
    np.testing.assert_array_equal(pixels_of(result(y=pixels.transpose(0, 3, 1, 2))._repr_html_()), pixels[0])
    np.testing.assert_array_equal(pixels_of(result(y=np.float32(pixels / 255))._repr_html_()), pixels[0])


def test_images_are_valid_files() -> None:
    image = pytest.importorskip("PIL.Image")
    import io

    pixels = np.random.default_rng(0).integers(0, 256, (1, 9, 11, 3)).astype(np.uint8)
    match = re.search(r"base64,([^\"]+)", result(y=pixels)._repr_html_())
    assert match is not None
    np.testing.assert_array_equal(np.asarray(image.open(io.BytesIO(b64decode(match[1])))), pixels[0])


def test_the_labels_of_the_model_are_used(client: Any) -> None:
    html = client.infer("Named", np.array([[0.25, 0.75]]))._repr_html_()
    assert bars(html) == [("c", "0.75"), ("a &lt;b&gt;", "0.25")]
    assert client.metadata("Named").labels["scores"].names == ("a <b>", "c")


def test_text_is_shown_without_decoding() -> None:
    shown = result(y=Tensor(object_array([b"a"], (1,)), BYTES, {"content_type": "mine"}))
    assert repr(shown) == "<Result of m: y: BYTES[1] ['a']>"
    assert "mine" not in shown._repr_html_()


def test_clients_show_themselves(client: Any, server: dragoman.Server, kind: tuple[str, str]) -> None:
    if kind[1] == "asyncio":
        assert repr(client.client) == f"AsyncClient({client.client.url!r})"
        return
    assert repr(client) == f"Client({client.url!r})"
    html = client._repr_html_()
    if kind[0] == "grpc":  # the list of models needs a token there
        assert "control" in html
        return
    assert re.search(r"Rows</td><td[^>]*>x FP32\[-1, 3\]</td><td[^>]*>sum FP32\[-1\]</td>", html)
    assert "power" in html


def test_a_client_without_a_server_shows_why() -> None:
    with dragoman.Client("http://127.0.0.1:1") as client:
        assert "Connection refused" in client._repr_html_()


def test_type_checkers_see_arrays(server: dragoman.Server) -> None:
    """mypy checks the assertions."""
    with dragoman.Client(server.http_url) as client:
        found = client.infer("Rows", np.ones((2, 3), np.float32))
        assert_type(found, Result)
        assert_type(found["sum"], NDArray[Any])
        assert_type(found.to_numpy(), NDArray[Any])
        assert_type(found["sum"].shape, tuple[Any, ...])
        assert found["sum"].shape == (2,)
