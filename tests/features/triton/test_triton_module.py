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


# --- requests and responses: the errors are Triton's own words --------------------------------------------------

FINAL = pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL
SENDER = "Unable to send response. "


@pytest.mark.parametrize(
    ("is_decoupled", "sends", "error"),
    [
        (True, [(True, 0), (True, 0), (False, FINAL)], ""),
        (True, [(False, FINAL)], ""),
        (True, [(True, FINAL)], ""),
        (False, [(True, FINAL)], ""),
        (False, [(True, 0), (False, FINAL)], ""),
        (True, [(True, 2)], SENDER + "Unsupported flag provided."),
        (True, [(True, FINAL), (True, 0)], SENDER + "Response sender has been closed."),
        (True, [(False, 0)], "Inference Response object must be provided when the response flags is set to zero."),
        (False, [(True, 0), (True, FINAL)], SENDER + "Non-decoupled model cannot send more than one response."),
        (
            False,
            [(False, FINAL)],
            SENDER + "Non-decoupled model cannot send complete final before sending a response.",
        ),
    ],
)
def test_senders_of_responses(is_decoupled: bool, sends: list[tuple[bool, int]], error: str) -> None:
    sent: list[tuple[bool, bool]] = []
    sender = pb_utils.InferenceResponseSender(
        lambda response, is_last: sent.append((response is not None, is_last)), lambda: False, is_decoupled=is_decoupled
    )

    def send(has_response: bool, flags: int) -> None:
        sender.send(pb_utils.InferenceResponse() if has_response else None, flags)

    accepted = sends[:-1] if error else sends
    for each in accepted:
        send(*each)
    if error:
        with pytest.raises(pb_utils.TritonModelException) as raised:
            send(*sends[-1])
        assert str(raised.value) == error
    assert sent == [(has_response, flags == FINAL) for has_response, flags in accepted]


def test_fields_of_requests() -> None:
    bare = pb_utils.InferenceRequest()
    found = (bare.model_name, bare.model_version, bare.request_id(), bare.correlation_id(), bare.flags())
    assert found == ("", -1, "", 0, 0)
    assert (bare.timeout(), bare.parameters(), bare.trace(), bare.inputs()) == (0, "{}", None, [])
    assert (bare.requested_output_names(), bare.is_cancelled(), bare.preferred_memory().preferred_memory_type) == (
        [],
        False,
        pb_utils.TRITONSERVER_MEMORY_CPU,
    )
    assert (pb_utils.MemoryType(2, 1).preferred_memory_type, pb_utils.MemoryType(2, 1).preferred_device_id) == (2, 1)
    assert pb_utils.MemoryType(2).preferred_device_id == 0
    bare.set_flags(3)
    assert bare.flags() == 3
    for flags in (0, 3):
        with pytest.raises(pb_utils.TritonModelException, match=f"Unsupported release flags: {flags}"):
            bare.set_release_flags(flags)
    with pytest.raises(pb_utils.TritonModelException, match="only with iterative_sequence: true"):
        bare.set_release_flags(pb_utils.TRITONSERVER_REQUEST_RELEASE_RESCHEDULE)
    bare.may_be_rescheduled = True
    for flags, is_again in ((pb_utils.TRITONSERVER_REQUEST_RELEASE_RESCHEDULE, True), (1, False)):
        bare.set_release_flags(flags)
        assert bare.is_rescheduled is is_again
    with pytest.raises(pb_utils.TritonModelException, match="only requests that the server has sent have a response"):
        bare.get_response_sender()
    bare.sender = pb_utils.InferenceResponseSender(lambda *_: None, lambda: True, is_decoupled=True)
    assert not bare.uses_sender
    assert bare.get_response_sender() is bare.sender
    assert (bare.uses_sender, bare.is_cancelled()) == (True, True)
    named = pb_utils.InferenceRequest(request_id=b"i", inputs=[pb_utils.Tensor("a", np.ones(1))])  # type: ignore[arg-type]
    assert named.request_id() == "i"
    tensor = pb_utils.get_input_tensor_by_name(named, "a")
    assert (tensor is named.inputs()[0], pb_utils.get_input_tensor_by_name(named, "b")) == (True, None)


def test_fields_of_responses() -> None:
    tensor = pb_utils.Tensor("a", np.ones(1))
    response = pb_utils.InferenceResponse((tensor,), parameters={"b": True, "i": 1, "f": 0.5, "s": "x"})
    assert pb_utils.get_output_tensor_by_name(response, "a") is tensor
    assert pb_utils.get_output_tensor_by_name(response, "b") is None
    assert (response.has_error(), response.error()) == (False, None)
    assert response.parameters() == '{"b": true, "i": 1, "f": 0.5, "s": "x"}'
    error = pb_utils.TritonError("no", pb_utils.TritonError.NOT_FOUND)
    failed = pb_utils.InferenceResponse(error=error)
    assert (failed.has_error(), failed.error(), failed.output_tensors(), failed.parameters()) == (True, error, [], "{}")
    assert (str(error), error.message(), error.code()) == ("no", "no", 2)
    assert pb_utils.TritonError("x").code() == pb_utils.TritonError.INTERNAL == 1
    given: Any
    for given, message in (
        ({"output_tensors": [1]}, "output_tensors: expected a list of Tensor"),
        ({"parameters": [1]}, "str as the keys and bool/int/str as the values, got <class 'list'>"),
        ({"parameters": {1: 2}}, "Expect parameters keys to have type str, found type <class 'int'>"),
        ({"parameters": {"a": []}}, "Expect parameters values to have type bool/int/str, found type <class 'list'>"),
    ):
        with pytest.raises(pb_utils.TritonModelException, match=message):
            pb_utils.InferenceResponse(**given)
    for code in (-1, 8, "1"):
        with pytest.raises(pb_utils.TritonModelException, match="expected a code of TritonError, got"):
            pb_utils.TritonError("x", code)  # type: ignore[arg-type]


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
