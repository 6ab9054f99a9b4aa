"""Small binary tensors, which are copied, are equal to large ones, which are views."""

from contextlib import ExitStack
from typing import Any
from unittest import mock

import numpy as np
import orjson
from hypothesis import given
from hypothesis import strategies as st

from dragoman.core.errors import DragomanError
from dragoman.formats import body, raw
from dragoman.formats.policy import Policy

KINDS = {"BOOL": 1, "UINT8": 1, "INT16": 2, "FP16": 2, "BF16": 2, "FP32": 4, "INT64": 8, "FP64": 8, "BYTES": 1, "X": 1}


@st.composite
def inputs(draw: st.DrawFn) -> tuple[dict[str, Any], bytes]:
    """Draw one input and its bytes; some are invalid."""
    kind = draw(st.sampled_from(list(KINDS)))
    shape = draw(st.lists(st.integers(-1, 4), max_size=3))
    size = max(0, int(np.prod(shape)) * KINDS[kind] + draw(st.sampled_from([0, 0, 0, 0, 1, -1])))
    raw = draw(st.binary(min_size=size, max_size=size))
    declared = draw(st.sampled_from([size, size, size, size + 1, -1, True, "1", None, 0]))
    more: dict[str, Any] = draw(st.sampled_from([{}, {}, {"content_type": "np"}, {"binary_data_size": declared}]))
    one: dict[str, Any] = {"name": draw(st.sampled_from("abc")), "datatype": kind, "shape": shape}
    one["parameters"] = {"binary_data_size": size, **more}
    if draw(st.integers(0, 9)) == 0:
        one["data"] = [1]
    return one, raw


@given(
    st.lists(inputs(), max_size=3),
    st.binary(max_size=1),
    st.sampled_from([Policy(), Policy(max_elements=4, max_rank=2)]),
)
def test_copies_and_views_are_equal(items: list[tuple[dict[str, Any], bytes]], end: bytes, policy: Policy) -> None:
    header = orjson.dumps({"inputs": [tensor for tensor, _ in items]})
    rest = memoryview(b"".join([raw for _, raw in items]) + end)

    def parse_inputs(*patches: Any) -> Any:
        with ExitStack() as stack:
            for patch in patches:
                stack.enter_context(patch)
            try:
                tensors = body.parse_request(header, rest, policy).inputs
            except DragomanError as error:
                return type(error), error.message
        return {
            n: (t.datatype, t.shape, t.data.flags.writeable, t.data.flags.aligned, t.data.tolist(), dict(t.parameters))
            for n, t in tensors.items()
        }

    views = parse_inputs(mock.patch.object(raw, "INLINE", 0))
    assert repr(views) == repr(parse_inputs())
