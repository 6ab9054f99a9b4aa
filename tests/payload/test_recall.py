"""What stands around the data of a request is known after a while; what a request means does not depend on that."""

from typing import Any

import pytest
from hypothesis import given, settings
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


IDS = [
    b'"1"', b'"a much longer one, 9f2c"', b'""', '"ü€"'.encode(), b'"[1,2]"', b'"{[}"', b'"id"', b'"data"', b'"]"',
    b'"a\\"b"', b'"a\\\\"', b'"a\\u0041"', b'"a\x00"', b'"a\nb"', b'"\x7f"', b'"\xff"', b'"\xed\xa0\x80"',
    b'"\xc2\x85"', b'"a""b"', b'"a', b'a"', b"", b"null", b"7", b"[]", b'["1"]', b'{"id":"1"}', b'"1","id":"2"',
    b'"1","data":[5,6]', b'"1"},{"id":"2"', b'null,"x":"1"', b'7,"x":"y"', b'"1","inputs":[]', b'"1" ', b' "1"',
    b'\n:"1"', b'"' + b"i" * 1800 + b'"',
]  # fmt: skip
WITH_ID = [
    ('{"id":@,"inputs":[{"name":"x","shape":[2],"datatype":"%s","data":', "}]}"),
    ('{"inputs":[{"name":"x","shape":[2],"datatype":"%s","data":', '}],"id":@}'),
    ('{"inputs":[{"name":"x","shape":[2],"datatype":"%s","data":', '}],"parameters":{"k":"v"}, "id" : @ }'),
    ('{"id":@,"parameters":{"id":"9"},"inputs":[{"name":"x","shape":[2],"datatype":"%s","data":', "}]}"),
    ('{"parameters":{"id":@},"inputs":[{"name":"x","shape":[2],"datatype":"%s","data":', "}]}"),
    ('{"parameters":{"id":@},"id":"1","inputs":[{"name":"x","shape":[2],"datatype":"%s","data":', "}]}"),
    ('{"id":@,"inputs":[{"name":"id","shape":[2],"datatype":"%s","data":', "}]}"),
    ('{"id":"1","inputs":[{"name":@,"shape":[2],"datatype":"%s","data":', "}]}"),
    ('{"inputs":[{"name":"x","id":@,"shape":[2],"datatype":"%s","data":', "}]}"),
    ('{"inputs":[{"name":"x","shape":[2],"datatype":"%s","data":', ',"id":@}]}'),
    ('{"outputs":[{"name":"id"}],"id":@,"inputs":[{"name":"x","shape":[2],"datatype":"%s","data":', "}]}"),
    ('{"\\u0069d":@,"inputs":[{"name":"x","shape":[2],"datatype":"%s","data":', "}]}"),
    ('{"id":@,"id":"1","inputs":[{"name":"x","shape":[2],"datatype":"%s","data":', "}]}"),
]  # fmt: skip
HEADS = [
    '{"inputs":[{"name":"x","shape":[2],"datatype":"%s","parameters":{"binary_data_size":4}}],"id":@}',
    '{"id":@,"inputs":[{"name":"x","shape":[1],"datatype":"%s","parameters":{"binary_data_size":2}},'
    '{"name":"y","shape":[2,1],"datatype":"%s","parameters":{"binary_data_size":4}}],"outputs":[{"name":"z"}]}',
    '{"id":@,"parameters":{"binary_data_output":true},"inputs":[{"name":"x","shape":[1,2],"datatype":"%s",'
    '"parameters":{"binary_data_size":4}}]}',
    '{"id":@,"inputs":[{"name":"x","shape":[2],"datatype":"%s","data":[1,2]},'
    '{"name":"y","shape":[2],"datatype":"%s","parameters":{"binary_data_size":4}}]}',
    '{"id":@,"inputs":[{"name":"x","shape":[2],"datatype":"%s","data":[1,2]}]}',
    '{"inputs":[{"name":"x","shape":[2],"datatype":"%s","parameters":{"binary_data_size":4, "id":@}}]}',
    '{"id":@,"inputs":[]}',
    '{"inputs":[{"name":"x","shape":[2],"datatype":"%s","parameters":{"binary_data_size":4}}]}',
]


def forget() -> None:
    recall._texts.clear()
    recall._heads.clear()
    recall._once.clear()
    recall._last = None


def told(text: bytes, policy: Policy, rest: bytes | None = None) -> Any:
    try:
        found = body.read_request(text, None if rest is None else memoryview(rest), policy)
    except DragomanError as fault:
        return type(fault), fault.message
    inputs = {
        n: (t.datatype, t.shape, t.data.tolist(), t.data.flags.writeable, t.data.flags.aligned, dict(t.parameters))
        for n, t in found.inputs.items()
    }
    return repr((inputs, list(found.outputs), found.parameters, found.id))


def same(texts: list[bytes], policy: Policy, rests: list[bytes | None]) -> None:
    """Each request means alone what it means behind the others."""
    alone = []
    for text, rest in zip(texts, rests, strict=True):
        forget()
        alone.append(told(text, policy, rest))
    forget()
    assert [told(text, policy, rest) for text, rest in zip(texts, rests, strict=True)] == alone


@given(
    st.sampled_from(AROUND),
    st.sampled_from(KINDS),
    st.lists(st.sampled_from(DATA), min_size=1, max_size=6),
    st.sampled_from([POLICY, Policy(max_elements=1), Policy(max_json_depth=4), Policy(nonfinite="literal")]),
)
def test_a_request_means_what_it_means_alone(around: Any, kind: str, data: list[str], policy: Policy) -> None:
    before, behind = around
    texts = [f"{before}{d}{behind}".replace("%s", kind).encode() for d in ["[1,0]", "[0,1]", "[1,1]", *data]]
    same(texts, policy, [None] * len(texts))


@settings(deadline=None)
@given(
    st.sampled_from(WITH_ID),
    st.lists(
        st.tuples(st.sampled_from(IDS), st.sampled_from(["[1,2]", "[3, 4]", *DATA])),
        min_size=1,
        max_size=6,
    ),
    st.sampled_from([POLICY, Policy(max_json_depth=4), Policy(nonfinite="literal")]),
)
def test_an_id_changes_nothing_else(around: Any, given: list[tuple[bytes, str]], policy: Policy) -> None:
    before, behind = (part.replace("%s", "FP32").encode() for part in around)
    usual = [(b'"1"', "[1,0]"), (b'"2"', "[0,1]"), (b'"3"', "[1,1]")]
    texts = [before.replace(b"@", i) + d.encode() + behind.replace(b"@", i) for i, d in [*usual, *given]]
    same(texts, policy, [None] * len(texts))


@settings(deadline=None)
@given(
    st.sampled_from(HEADS),
    st.sampled_from(["INT16", "FP16", "UINT8", "BOOL", "BYTES", "FP32"]),
    st.lists(st.tuples(st.sampled_from(IDS), st.binary(max_size=8)), min_size=1, max_size=6),
    st.sampled_from([POLICY, Policy(max_elements=1), Policy(max_json_depth=4), Policy(nonfinite="literal")]),
)
def test_binary_data_of_heads_that_came_before(
    head: str, kind: str, given: list[tuple[bytes, bytes]], policy: Policy
) -> None:
    text = head.replace("%s", kind).encode()
    size = 6 if "2,1" in head else 0 if "[]" in head else 4
    usual = [(b'"1"', b"abcdef"[:size]), (b'"2"', b"\0\1\1\0\1\1"[:size]), (b'"3"', b"ABCDEF"[:size])]
    texts = [text.replace(b"@", i) for i, _ in [*usual, *given]]
    same(texts, policy, [rest for _, rest in [*usual, *given]])


def test_what_came_twice_is_known_for_its_own_policy_alone() -> None:
    forget()
    text = b'{"inputs":[{"name":"x","shape":[2],"datatype":"FP32","data":[1,2]}]}'
    assert recall.recalled(text, POLICY) is None
    for _ in range(2):
        body.read_request(text, None, POLICY)
    assert recall.recalled(text.replace(b"[1,2]", b"[3,4]"), POLICY) is not None
    assert recall.recalled(text, Policy()) is None


@pytest.mark.parametrize(
    "text", [text for text in WITH_ID[:3] if "@" in "".join(text)] + [(text, "") for text in (*HEADS[:3], HEADS[6])]
)
def test_what_came_with_another_id_is_known(text: tuple[str, str]) -> None:
    forget()
    binary, size = not text[1], 6 if "2,1" in text[0] else 0 if "[]" in text[0] else 4
    rest = memoryview(b"abcdef"[:size]) if binary else None
    whole = "[1,2]".join(text).removesuffix("[1,2]").replace("%s", "INT16")

    def found(id_: str) -> Any:
        asked = whole.replace("@", id_).encode()
        if rest is None:
            return recall.recalled(asked, POLICY)
        return recall.recalled_head(asked, rest, POLICY)

    for id_ in ('"1"', '"2"'):
        assert found(id_) is None
        body.read_request(whole.replace("@", id_).encode(), rest, POLICY)
    known = found('"a third, ü"')
    assert known.id == "a third, ü"
    assert known.around is found('""').around
    for strange in ('"a\\n"', '"\x01"', "null", '"1","x":"2"'):
        assert found(strange) is None


@pytest.mark.parametrize("binary", [True, False])
def test_parameters_are_each_requests_own(binary: bool) -> None:
    forget()
    how = '"parameters":{"binary_data_size":4}' if binary else '"data":[1]'
    text = '{"parameters":{"k":1},"inputs":[{"name":"x","shape":[1],"datatype":"FP32",' + how + "}]}"
    for _ in range(4):
        found = body.read_request(text.encode(), memoryview(b"abcd") if binary else None, POLICY)
        assert found.parameters == {"k": 1}
        found.parameters.clear()


@pytest.mark.parametrize("binary", [True, False])
@pytest.mark.parametrize("ids", [True, False])
def test_what_is_known_has_a_bound(ids: bool, binary: bool) -> None:
    forget()
    how = '"parameters":{"binary_data_size":4}' if binary else '"data":[1]'
    for number in range(2000):
        name = f'"id":"{number}",' if ids else f'"parameters":{{"n":{number}}},'
        text = "{" + name + '"inputs":[{"name":"x","shape":[1],"datatype":"FP32",' + how + "}]}"
        for _ in range(3):
            body.read_request(text.encode(), memoryview(b"abcd") if binary else None, POLICY)
    assert len(recall._once) <= 512
    known = recall._heads if binary else recall._texts
    assert len(known) == 1 if ids else 0 < len(known) <= 512
