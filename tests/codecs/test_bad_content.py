"""Values that do not fit their content type are rejected; the error names input, content type and element."""

import io
import zlib
from typing import Any

import numpy as np
import pytest
from PIL import Image, ImageFile

from dragoman.codecs.codec import CODECS
from dragoman.codecs.decode import NO_DEFAULTS, Defaults, decode_input, decode_request, encode_answer, encode_output
from dragoman.codecs.image import PillowImageCodec, image_decoder
from dragoman.core.calls import Infer
from dragoman.core.datatypes import UINT8
from dragoman.core.errors import InvalidInput, InvalidOutput
from dragoman.core.tensor import Tensor

PREFIX = "input 'x': content type '{}': "


@pytest.mark.parametrize(
    ("content_type", "elements", "message"),
    [
        ("base64", [b"aGk=", b"a*k="], "expected base64, got b'a*k=' at element 1"),
        ("base64", [b"aGk"], "expected base64, got b'aGk' at element 0"),
        ("base64", ["ü".encode()], "expected base64"),
        ("datetime", [b"2020-01-01", b"never"], "expected ISO 8601, got b'never' at element 1"),
        ("datetime", [b"2020-13-01"], "expected ISO 8601, got b'2020-13-01' at element 0"),
        ("datetime", [b"2020-01-01T00:00:00.123456789"], "finer than microseconds"),
        ("str", [b"a", b"\xff"], r"expected UTF-8 text, got b'\xff' at element 1"),
        ("json", [b"1", b"{"], "expected JSON, got b'{' at element 1"),
        ("json", [b"NaN"], "expected JSON, got b'NaN' at element 0"),
        ("json", [b"[" * 100000], "expected JSON"),
        ("json", [b'"\\ud800"'], "expected JSON"),
        (
            "pillow_image",
            [b"aGk="],
            "an image (PNG, JPEG, WEBP, GIF, BMP, TIFF, PPM), got b'aGk=' at element 0",
        ),
        ("pillow_image", [b"%!PS-Adobe-3.0 EPSF"], "expected an image"),
        ("pillow_image", [b"\x89PNG\r\n\x1a\nshort"], "expected an image"),
    ],
)
def test_errors_name_the_bad_element(content_type: str, elements: list[bytes], message: str) -> None:
    tensor = Tensor.of(np.array(elements, dtype=object), parameters={"content_type": content_type})
    with pytest.raises(InvalidInput) as caught:
        decode_input("x", tensor)
    assert PREFIX.format(content_type) in caught.value.message
    assert message in caught.value.message
    assert len(caught.value.message) < 400


@pytest.mark.parametrize("content_type", ["str", "base64", "datetime", "json", "pd_json", "pillow_image"])
def test_content_types_of_bytes_reject_other_datatypes(content_type: str) -> None:
    tensor = Tensor.of(np.array([1.5]), parameters={"content_type": content_type})
    with pytest.raises(InvalidInput, match=PREFIX.format(content_type) + "expected datatype BYTES.*, got FP64"):
        decode_input("x", tensor)


def test_unknown_content_types_are_rejected() -> None:
    tensor = Tensor.of(np.array([1.5]), parameters={"content_type": "npy"})
    with pytest.raises(InvalidInput, match=r"input 'x': unknown content type 'npy': expected one of base64, "):
        decode_input("x", tensor)
    with pytest.raises(InvalidInput, match=r"unknown content type 'base64' of a request: expected .*np, "):
        decode_request(Infer({"x": tensor}, (), {"content_type": "base64"}))


def _columns(**columns: Any) -> Infer:
    return Infer({n: Tensor.of(np.asarray(c)) for n, c in columns.items()}, (), {"content_type": "pd"})


def test_invalid_data_frames_are_rejected() -> None:
    with pytest.raises(InvalidInput, match="'pd': expected inputs of equal lengths as columns, got 'a' 2, 'b' 3"):
        decode_request(_columns(a=[1, 2], b=[1, 2, 3]))
    with pytest.raises(InvalidInput, match=r"input 'b': content type 'pd': expected a column of shape .* got \[2, 2\]"):
        decode_request(_columns(a=[1, 2], b=[[1, 2], [3, 4]]))
    with pytest.raises(InvalidInput, match=r"input 'b': content type 'pd': expected a column of shape .* got \[\]"):
        decode_request(_columns(b=1))
    with pytest.raises(InvalidInput, match="content type 'np': expected one input, got none"):
        decode_request(Infer({}, (), {"content_type": "np"}))
    stacked = Tensor.of(["2020-01-01", "x"], parameters={"content_type": "datetime"})
    with pytest.raises(InvalidInput, match="input 'day': content type 'datetime': expected ISO 8601, got b'x' at"):
        decode_request(Infer({"day": stacked}, (), {"content_type": "pd"}))


@pytest.mark.parametrize(
    "parameters",
    [
        {"pandas_dtype": "period[M]"},
        {"pandas_dtype": "datetime64[us, ../../etc/passwd]", "content_type": "datetime"},
        {"pandas_dtype": "datetime64[us, Nowhere/Else]", "content_type": "datetime"},
        {"pandas_dtype": "datetime64[us]", "content_type": "datetime"},
        {"pandas_dtype": "Int64"},
        {"pandas_dtype": "boolean", "content_type": "pd_json"},
        {"pandas_dtype": "category"},
        {"pandas_dtype": "category", "pandas_categories": "{}"},
        {"pandas_dtype": "category", "pandas_categories": '["a","a"]'},
        {"pandas_dtype": "category", "pandas_categories": '["a"]', "pandas_categories_dtype": "int64"},
        {"pandas_dtype": "category", "pandas_categories": '["z"]', "pandas_categories_dtype": "str"},
        {"pandas_dtype": "timedelta64[ns]"},
        {"pandas_label": 1.5},
        {"numpy_dtype": "<U9", "content_type": "np", "pandas_dtype": "Float32"},
    ],
)
def test_invalid_pandas_parameters_are_rejected(parameters: dict[str, Any]) -> None:
    tensor = Tensor.of(["now", "NaT"], parameters=parameters)
    with pytest.raises(InvalidInput, match="input 'x': "):
        decode_request(Infer({"x": tensor}, (), {"content_type": "pd"}))


@pytest.mark.parametrize("dtype", ["<U1000000000", "<U1", "V8", "i4,i4", "M8[D]", "?", "nonsense", "O"])
def test_invalid_numpy_dtypes_are_rejected(dtype: str) -> None:
    tensor = Tensor.of(["ab", "c"], parameters={"numpy_dtype": dtype, "content_type": "np"})
    with pytest.raises(InvalidInput, match="input 'x': content type 'np'"):
        decode_input("x", tensor)


def test_numbers_outside_a_nullable_dtype_are_rejected() -> None:
    for numbers in ([1.5, 2], [300.0, 2], [float("inf"), 1]):
        tensor = Tensor.of(np.array(numbers), parameters={"pandas_dtype": "Int8"})
        with pytest.raises(InvalidInput, match="cannot hold every number"):
            decode_request(Infer({"x": tensor}, (), {"content_type": "pd"}))


# --- precedence ------------------------------------------------------------------------------------------


def test_precedence_of_content_types() -> None:
    text = Tensor.of(["aGk="])
    own = Tensor.of(["aGk="], parameters={"content_type": "base64"})
    assert decode_input("x", own, "str", list[str]) == [b"hi"]
    assert decode_input("x", text, "base64", list[str]) == [b"hi"]
    assert decode_input("x", text, "", list[str]) == ["aGk="]
    assert decode_input("x", text) is text.data
    call = Infer({"x": text}, (), {"content_type": "str"})
    assert decode_request(call, Defaults("np")) == ["aGk="]
    bare = Infer({"x": text})
    assert decode_request(bare, Defaults("str"), np.ndarray) == ["aGk="]
    assert decode_request(bare, NO_DEFAULTS, np.ndarray) is text.data
    assert decode_request(bare, Defaults("", {"x": "base64"})) == {"x": [b"hi"]}
    assert decode_request(Infer({"x": text}, (), {"content_type": "pd"}), Defaults("", {"x": "base64"})).x[0] == b"hi"


def test_encode_answer_and_encode_output() -> None:
    import pandas as pd

    both = encode_answer((np.arange(2), ["a"]), names=("first",))
    assert list(both.outputs) == ["first", "output-1"]
    assert both.outputs["first"].shape == (2, 1)
    assert encode_answer(["a"]).outputs["output-0"].parameters["content_type"] == "str"
    assert encode_answer({"y": 1.5}).outputs["y"].data.tolist() == 1.5
    assert encode_answer(pd.DataFrame({"a": [1]})).parameters == {"content_type": "pd"}
    assert encode_answer(np.arange(2), "np").parameters == {"content_type": "np"}
    with pytest.raises(InvalidOutput, match="output 'y': "):
        encode_output("y", object())
    with pytest.raises(InvalidOutput, match=r"period\[M\]"):
        encode_answer(pd.DataFrame({"a": pd.period_range("2020", periods=1, freq="M")}))


# --- images ----------------------------------------------------------------------------------------------


def test_images_from_files_base64_and_pixels() -> None:
    image = Image.new("RGB", (3, 2), (1, 2, 3))
    coded = PillowImageCodec.to_tensor(image).data.flat[0]
    for element in (coded, b"data:image/png;base64," + coded, __import__("base64").b64decode(coded)):
        (back,) = decode_input("x", Tensor.of([element], parameters={"content_type": "pillow_image"}))
        assert back.tobytes() == image.tobytes()
    for pixels in (np.zeros((2, 3)), np.zeros((2, 3, 3)), np.zeros((5, 2, 3, 4))):
        images = CODECS.input("pillow_image").to_value(Tensor.of(pixels.astype(np.uint8)))
        assert len(images) == (5 if pixels.ndim == 4 else 1)
        assert images[0].size == (3, 2)
    with pytest.raises(InvalidInput, match=r"expected shape \[H, W\].* got \[2, 3, 7\]"):
        PillowImageCodec.to_value(Tensor(np.zeros((2, 3, 7), np.uint8), UINT8), "input 'x'")
    with pytest.raises(InvalidInput, match="expected one of the formats PNG"):
        PillowImageCodec.to_tensor(image, format="EPS")


def png(side: int) -> bytes:
    """Return a small file of a large picture, of which the pixels are missing."""
    header = b"IHDR" + side.to_bytes(4, "big") * 2 + bytes([1, 0, 0, 0, 0])
    chunks = [header, b"IDAT" + zlib.compress(bytes((side // 8 + 1) * side)), b"IEND"]
    parts = ((len(c) - 4).to_bytes(4, "big") + c + zlib.crc32(c).to_bytes(4, "big") for c in chunks)
    return b"\x89PNG\r\n\x1a\n" + b"".join(parts)


def jpeg_of_scans(scans: int, progressive: bool) -> bytes:
    """Return a JPEG with a scan for all pixels that is there several times."""
    file = io.BytesIO()
    Image.new("L" if progressive else "CMYK", (8, 8)).save(file, "JPEG", progressive=progressive)
    head, scan, _ = (content := file.getvalue()[:-2]).rpartition(b"\xff\xda")
    return content + (scan + content[len(head) + 2 :]) * (scans - content.count(scan)) + b"\xff\xd9"


@pytest.mark.parametrize(
    ("elements", "message"),
    [
        ([png(9000)], "expected at most 67108864 pixels, got 9000 x 9000"),
        ([png(8192)] * 5, "expected at most 268435456 pixels in all images, got more"),
        ([jpeg_of_scans(101, True)], "expected a JPEG of at most 100 scans, got 101"),
        ([jpeg_of_scans(101, False)], "expected a JPEG of at most 100 scans, got 101"),
    ],
)
def test_files_that_expand_are_rejected(elements: list[bytes], message: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ImageFile.ImageFile, "load", lambda self: None)  # the pixels are never needed
    with pytest.raises(InvalidInput, match=message):
        PillowImageCodec.to_value(Tensor.of(elements), "input 'x'")
    decode = image_decoder()
    with pytest.raises(InvalidInput, match=f"input 'x': .*{message}"):
        for element in elements:
            decode(element, "input 'x'")
    assert image_decoder()(jpeg_of_scans(100, True), "input 'x'").size == (8, 8)


@pytest.mark.parametrize("content_type", ["str", "base64", "datetime"])
@pytest.mark.parametrize("value", [5, [5], {"a": 1}, ["a", 5], [["a"]]])
def test_unsupported_values_are_rejected(content_type: str, value: Any) -> None:
    with pytest.raises(InvalidInput, match=f"value: content type '{content_type}': expected a list"):
        CODECS.input(content_type).to_tensor(value)


def test_unpaired_surrogates_are_rejected() -> None:
    with pytest.raises(InvalidInput, match=r"expected text that UTF-8 can encode, got .* at element 1"):
        CODECS.input("str").to_tensor(["a", "\ud800"])
