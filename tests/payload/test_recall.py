"""What stands around the data of a request is known after a while; what a request means does not depend on that."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dragoman.core.errors import DragomanError
from dragoman.payload import body, recall
from dragoman.payload.policy import Policy

POLICY = Policy()
KINDS = ["FP32", "FP64", "FP16", "INT8", "UINT64", "BOOL", "BYTES"]
DATA = [
    "[1,2]", "[1.5,-2]", "[3, 4]", " [5,6]", "[[7,8]]", "[[7],[8]]", "[1]", "[1,2,3]", "[]", "[true,false]",
    '["a","b"]', "[null,1]", "[1e999,1]", "[300,1]", "[1,2", "1,2]", "[1,,2]", "[1,2]]", "[NaN,1]", "null", "{}",
    '[1,2],"data":[3,4]',
    '[1,2],"more":[9]', '[1,2],"name":"z"', '[1,2]}],"inputs":[{"name":"q","shape":[1],"datatype":"FP32","data":[1]',
]  # fmt: skip
AROUND = [
    ('{"inputs":[{"name":"x","shape":[2],"datatype":"%s","data":', "}]}"),
    ('{"inputs": [{"data": ', ', "name": "x", "datatype": "%s", "shape": [1, 2]}], "parameters": {"k": 1}}'),
    ('{"outputs":[{"name":"y"}],"inputs":[{"name":"x","shape":[2],"datatype":"%s","data":', "}]}"),
    ('{"inputs":[{"name":"\\"data\\":[1,2]","shape":[2],"datatype":"%s","data":', "}]}"),
    ('{"inputs":[{"name":"x","shape":[2],"datatype":"%s","d\\u0061ta":[8,9],"data":', "}]}"),
    ('{"inputs":[{"name":"x","shape":[2],"datatype":"%s","more":[1,2],"data":', "}]}"),
    ('{"id":"1","inputs":[{"name":"x","shape":[2],"datatype":"%s","data":', "}]}"),
    (
        '{"inputs":[{"name":"x","shape":[2],"datatype":"%s","data":',
        '},{"name":"w","shape":[1],"datatype":"BOOL","data":[true]}]}',
    ),
    ('{"inputs":[{"name":"x","shape":[2],"datatype":"%s","data":', '}],"inputs":[]}'),
]  # fmt: skip


def forget() -> None:
    recall._known.clear()
    recall._once.clear()


def told(text: bytes, policy: Policy) -> Any:
    try:
        found = body.read_request(text, None, policy)
    except DragomanError as fault:
        return type(fault), fault.message
    inputs = {n: (t.datatype, t.shape, t.data.tolist(), dict(t.parameters)) for n, t in found.inputs.items()}
    return repr((inputs, [o.name for o in found.outputs], found.parameters, found.id))


@given(
    st.sampled_from(AROUND),
    st.sampled_from(KINDS),
    st.lists(st.sampled_from(DATA), min_size=1, max_size=6),
    st.sampled_from([POLICY, Policy(max_elements=1), Policy(max_json_depth=4), Policy(nonfinite="literal")]),
)
def test_a_request_means_what_it_means_alone(around: Any, kind: str, data: list[str], policy: Policy) -> None:
    before, behind = around
    texts = [f"{before}{d}{behind}".replace("%s", kind).encode() for d in ["[1,0]", "[0,1]", "[1,1]", *data]]
    alone = []
    for text in texts:
        forget()
        alone.append(told(text, policy))
    forget()
    assert [told(text, policy) for text in texts] == alone


def test_what_came_twice_is_known_for_its_own_policy_alone() -> None:
    forget()
    text = b'{"inputs":[{"name":"x","shape":[2],"datatype":"FP32","data":[1,2]}]}'
    assert recall.recalled(text, POLICY) is None
    for _ in range(2):
        body.read_request(text, None, POLICY)
    assert recall.recalled(text.replace(b"[1,2]", b"[3,4]"), POLICY) is not None
    assert recall.recalled(text, Policy()) is None


def test_parameters_are_each_requests_own() -> None:
    forget()
    text = b'{"parameters":{"k":1},"inputs":[{"name":"x","shape":[1],"datatype":"FP32","data":[1]}]}'
    for _ in range(4):
        found = body.read_request(text, None, POLICY)
        assert found.parameters == {"k": 1}
        found.parameters.clear()


@pytest.mark.parametrize("ids", [True, False])
def test_what_is_known_has_a_bound(ids: bool) -> None:
    forget()
    for number in range(2000):
        name = f'"id":"{number}",' if ids else f'"parameters":{{"n":{number}}},'
        text = "{" + name + '"inputs":[{"name":"x","shape":[1],"datatype":"FP32","data":[1]}]}'
        for _ in range(3):
            body.read_request(text.encode(), None, POLICY)
    assert len(recall._known) <= 512
    assert len(recall._once) <= 512
    assert bool(recall._known) is not ids
