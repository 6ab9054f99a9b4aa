"""Functions and tensors of `triton_python_backend_utils` as values; remarks on the files of a folder."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from dragoman_triton import pb_utils
from dragoman_triton.model_files import survey
from features.triton.repository import write


def test_text_as_bytes() -> None:
    array = np.array([["a", "é"], [b"\x00\xff", ""]], object)
    encoded = pb_utils.serialize_byte_tensor(array)
    assert encoded == b"\x01\0\0\0a\x02\0\0\0\xc3\xa9\x02\0\0\0\x00\xff\0\0\0\0"
    assert pb_utils.deserialize_bytes_tensor(encoded).tolist() == [b"a", "é".encode(), b"\x00\xff", b""]
    assert pb_utils.serialize_byte_tensor(np.array([], object)) == ()
    assert pb_utils.deserialize_bytes_tensor(b"").tolist() == []


@pytest.mark.parametrize(
    ("name", "number", "dtype"),
    [
        ("TYPE_BOOL", 1, np.bool_),
        ("TYPE_UINT8", 2, np.uint8),
        ("TYPE_UINT64", 5, np.uint64),
        ("TYPE_INT8", 6, np.int8),
        ("TYPE_INT64", 9, np.int64),
        ("TYPE_FP16", 10, np.float16),
        ("TYPE_FP32", 11, np.float32),
        ("TYPE_FP64", 12, np.float64),
        ("TYPE_STRING", 13, np.object_),
    ],
)
def test_types(name: str, number: int, dtype: Any) -> None:
    assert pb_utils.triton_string_to_numpy(name) is dtype
    assert pb_utils.triton_to_numpy_type(number) is dtype
    assert pb_utils.numpy_to_triton_type(dtype) == number
    values = np.array(["a"] if dtype is np.object_ else [1], dtype)
    tensor = pb_utils.Tensor("x", values)
    assert (tensor.name(), tensor.triton_dtype(), tensor.shape(), tensor.is_cpu()) == ("x", number, [1], True)


def test_parts_of_a_configuration() -> None:
    config = {"input": [{"name": "a"}, {"name": "b"}], "output": [{"name": "c"}]}
    assert pb_utils.get_input_config_by_name(config, "b") == {"name": "b"}
    assert pb_utils.get_input_config_by_name(config, "c") is None
    assert pb_utils.get_output_config_by_name(config, "c") == {"name": "c"}
    assert pb_utils.get_output_config_by_name({}, "c") is None
    assert not pb_utils.using_decoupled_model_transaction_policy(config)
    policy = {"model_transaction_policy": {"decoupled": True}}
    assert pb_utils.using_decoupled_model_transaction_policy({**config, **policy})


class OnDevice:
    """An array of a GPU: only its copy in the memory of the CPU can be read."""

    def __init__(self, array: Any) -> None:
        self._array = array

    def __dlpack_device__(self) -> tuple[int, int]:
        return 2, 0

    def __dlpack__(self, **options: Any) -> Any:
        raise AssertionError("it is not in the memory of the CPU")

    def cpu(self) -> Any:
        return self._array


def test_tensors_of_other_libraries() -> None:
    array = np.array([[1.5, 2.0]], np.float32)
    for given in (array, OnDevice(array), array.__dlpack__()):
        tensor = pb_utils.Tensor.from_dlpack("x", given)
        assert (tensor.name(), tensor.as_numpy().tolist(), tensor.triton_dtype()) == ("x", [[1.5, 2.0]], 11)
    assert np.from_dlpack(tensor).tolist() == [[1.5, 2.0]]
    array[0, 0] = 9.0
    assert tensor.as_numpy()[0, 0] == 1.5  # it is a copy
    with pytest.raises(pb_utils.TritonModelException, match="tensor 'x': DLPack does not support TYPE_STRING"):
        pb_utils.Tensor("x", np.array(["a"], object)).to_dlpack()


def test_remarks_on_the_files_of_a_folder(tmp_path: Path) -> None:
    tensor = 'input { name: "x" data_type: TYPE_FP32 dims: 1 } output { name: "y" data_type: TYPE_FP32 dims: 1 }\n'
    for path, text in (
        ("b/m/config.pbtxt", f'backend: "python"\n{tensor}metric_tags {{ key: "a" value: "b" }}'),
        ("a/config.pbtxt", f'backend: "python"\n{tensor}\nmy_field: 3'),
        ("broken/config.pbtxt", "{"),
        ("a/other.pbtxt", "my_field: 3"),
    ):
        write(tmp_path / path, text)
    assert [(r.location, r.subject, r.effect) for r in survey(tmp_path)] == [
        ("a/config.pbtxt:4", "my_field", "unused"),
        ("b/m/config.pbtxt:3", "metric_tags", "missing"),
    ]
    assert survey(tmp_path / "a" / "config.pbtxt") == []
