"""Arguments and results of custom handlers, by the rules of FastAPI; the engine runs in the test's process."""

from collections.abc import AsyncIterator

import pytest
import pytest_asyncio

import dragoman
from dragoman.core.calls import Handle, Handled, Request
from dragoman.core.errors import DragomanError, InvalidInput, InvalidOutput, ModelFailed, ModelNotFound
from dragoman.engine.engine import Engine
from features.triton.repository import write

DESK = '''
from collections.abc import Mapping
from typing import Annotated, Any, List, Optional, Union

from fastapi import Body, Depends, Header, Path, Query
from fastapi.responses import JSONResponse, Response
from mlserver import MLModel
from mlserver.errors import MLServerError
from mlserver.handlers import PlainRequest, custom_handler, get_custom_handlers
from mlserver.types import InferenceRequest, Parameters
from starlette.requests import Request
from typing_extensions import TypeAliasType

Vector = TypeAliasType("Vector", int)


class OwnError(MLServerError):
    """An error with any status."""


def doubled(number: int) -> int:
    return 2 * number


async def both(twice: int = Depends(doubled), sign: str = Header("?")) -> str:
    return f"{twice}{sign}"


class Sized:
    def __init__(self, size: int = 7) -> None:
        self.size = size


class Desk(MLModel):
    @custom_handler("/query", "get")
    def query(self, i: int = 0, f: float = 0.0, b: bool = False, s: str = "", o: Optional[int] = None,
              u: Union[int, str] = 5, n: "int | None" = 9):
        return [i, f, b, s, o, u, n]

    @custom_handler("/required", "GET")
    def required(self, i: int, o: Optional[int]):
        return [i, o]

    @custom_handler("/any")
    def any(self, value):
        return value

    @custom_handler("/hinted")
    def hinted(self, value: Any, other: List[int] = ()):
        return [value, other]

    @custom_handler("/typed")
    def typed(self, value: Union[dict, List[int], None] = None):
        return [type(value).__name__, value]

    @custom_handler("/request")
    def request(self, payload: InferenceRequest):
        return [type(payload).__name__, payload.inputs[0].name, payload]

    @custom_handler("/markers/{key}")
    def markers(
        self,
        key: str = Path(),
        x_user: str = Header("nobody"),
        x_raw: str = Header("none", convert_underscores=False),
        other: str = Header(None, alias="x-else"),
        missing: Optional[int] = Query(),
        whole: dict = Body(embed=True),
    ):
        return [key, x_user, x_raw, other, missing, whole]

    @custom_handler("/marker-of-hint", "GET")
    def marker_of_hint(self, a: Annotated[int, Query(alias="b")] = 3, c: Annotated[int, "no marker"] = 4):
        return [a, c]

    @custom_handler("/needed", "GET")
    def needed(self, a: int = Query(...), b: int = Query()):
        return [a, b]

    @custom_handler("/depends", "GET")
    async def depends(self, text: str = Depends(both), size: Sized = Depends()):
        return [text, size.size]

    @custom_handler("/plain/{name}")
    async def plain(self, request: PlainRequest):
        return [request.method, request.headers, request.path_params, request.query_params,
                (await request.body()).decode(), await request.json()]

    @custom_handler("/starlette/{name}")
    async def starlette(self, request: Request):
        return [request.method, request.url.path, dict(request.headers), request.path_params,
                dict(request.query_params), await request.json()]

    @custom_handler("/only-for-checkers", "GET")
    def only_for_checkers(self, size: "OfCheckers" = 3, number: "Annotated[int, Query(alias='n')]" = 4):
        return [size, number]

    @custom_handler("/aliased", "GET")
    def aliased(self, vector: "Vector" = 1, number: "Annotated[int, Query(alias='n')]" = 4):
        return [vector, number]

    @custom_handler("/rest")
    def rest(self, first: dict, *args, **kwargs):
        return [first, args, kwargs]

    @custom_handler("/response", "GET")
    def response(self):
        return JSONResponse({"a": 1}, status_code=201, headers={"x-a": "b"})

    @custom_handler("/typeless", "GET")
    def typeless(self):
        return Response(b"raw")

    @custom_handler("/plain-values", "GET")
    async def plain_values(self):
        return {"b": b"text", "t": (1, 2), "s": {3}, "f": frozenset({4}), "p": Parameters(content_type="np"), 5: None}

    @custom_handler("/no-json", "GET")
    def no_json(self):
        return {"a": object()}

    @custom_handler("/error", "GET")
    def error(self, status: int):
        raise OwnError("in their words", status)

    @custom_handler("/listed", "GET")
    def listed(self):
        found = {each.rest_path: (each.rest_method, method.__name__) for each, method in get_custom_handlers(self)}
        return [found["/listed"], found["/any"], len(found)]
'''


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def engine(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Engine]:
    folder = tmp_path_factory.mktemp("desk")
    settings = '{"name": "desk", "implementation": "desk.Desk", "parallel_workers": 0}'
    write(folder / "desk/model-settings.json", settings)
    write(folder / "desk/desk.py", DESK)
    async with dragoman.open_engine(str(folder)) as engine:
        yield engine


async def ask(engine: Engine, line: str, content: str = "", metadata: dict[str, str] | None = None) -> Handled:
    method, _, target = line.partition(" ")
    path, _, query = target.partition("?")
    call = Handle(method=method, path=path, query=query, content=content.encode(), content_type="application/json")
    response = await engine.call(Request(call, metadata=metadata or {}))
    return response.answer


TENSOR = '{"inputs":[{"name":"x","shape":[1],"datatype":"INT32","data":[1]}]}'
USER = {"x-user": "ada", "x_raw": "r", "x-else": "e"}


@pytest.mark.asyncio(loop_scope="module")
@pytest.mark.parametrize(
    ("line", "content", "metadata", "expected"),
    [
        ("GET /query", "", {}, '[0,0.0,false,"",null,5,9]'),
        ("GET /query?i=-3&f=2&b=on&s=&o=4&u=6&n=8", "", {}, '[-3,2.0,true,"",4,6,8]'),
        ("GET /query?b=YES&u=x&s=a%20b", "", {}, '[0,0.0,true,"a b",null,"x",9]'),
        ("GET /query?b=1", "", {}, '[0,0.0,true,"",null,5,9]'),
        ("GET /query?b=true&f=1e3", "", {}, '[0,1000.0,true,"",null,5,9]'),
        ("GET /query?b=Off", "", {}, '[0,0.0,false,"",null,5,9]'),
        ("GET /required?i=1", "", {}, "[1,null]"),
        ("GET /required?i=1&o=2", "", {}, "[1,2]"),
        ("POST /any", '{"a":[1,"x"]}', {}, '{"a":[1,"x"]}'),
        ("POST /hinted", '{"value":{"a":1}}', {}, '[{"a":1},[]]'),
        ("POST /hinted", '{"value":"x","other":[2]}', {}, '["x",[2]]'),
        ("POST /typed", '{"a":1}', {}, '["dict",{"a":1}]'),
        ("POST /typed", "[1]", {}, '["list",[1]]'),
        ("POST /typed", " ", {}, '["NoneType",null]'),
        ("POST /request", TENSOR, {}, f'["InferenceRequest","x",{TENSOR}]'),
        ("POST /markers/k%2Fl", '{"whole":{"a":1}}', {}, '["k/l","nobody","none",null,null,{"a":1}]'),
        ("POST /markers/k?missing=5", '{"whole":{}}', USER, '["k","ada","r","e",5,{}]'),
        ("GET /marker-of-hint?b=1&c=2&a=9", "", {}, "[1,2]"),
        ("GET /marker-of-hint", "", {}, "[3,4]"),
        ("GET /needed?a=1&b=2", "", {}, "[1,2]"),
        ("GET /depends?number=4", "", {}, '["8?",7]'),
        ("GET /depends?number=4&size=1", "", {"sign": "!"}, '["8!",1]'),
        (
            "POST /plain/n%20m?a=1&b=",
            " [1] ",
            USER,
            '["POST",{"content-type":"application/json","x-user":"ada","x_raw":"r","x-else":"e"},{"name":"n m"},'
            '{"a":"1","b":""}," [1] ",[1]]',
        ),
        ("POST /plain/n", "", {}, '["POST",{"content-type":"application/json"},{"name":"n"},{},"",null]'),
        (
            "POST /starlette/n?a=1",
            '{"b":2}',
            {"x-user": "é", "x-none": ""},
            '["POST","/starlette/n",{"content-type":"application/json","x-user":"é"},{"name":"n"},{"a":"1"},{"b":2}]',
        ),
        ("GET /only-for-checkers", "", {}, "[3,4]"),
        ("GET /aliased?vector=5&n=6", "", {}, "[5,6]"),
        ("POST /rest", '{"a":1}', {}, '[{"a":1},[],{}]'),
        ("GET /plain-values", "", {}, '{"b":"text","t":[1,2],"s":[3],"f":[4],"p":{"content_type":"np"},"5":null}'),
        ("GET /listed", "", {}, '[["GET","listed"],["POST","any"],21]'),
    ],
)
async def test_arguments_and_results(
    engine: Engine, line: str, content: str, metadata: dict[str, str], expected: str
) -> None:
    found = await ask(engine, line, content, metadata)
    assert found.content.decode() == expected
    assert (found.status, found.content_type, found.metadata) == (200, "application/json", {})


@pytest.mark.asyncio(loop_scope="module")
@pytest.mark.parametrize(
    ("line", "content", "error", "message"),
    [
        ("GET /query?i=1.0", "", InvalidInput, "'i': expected int, got '1.0'"),
        ("GET /query?b=maybe", "", InvalidInput, "'b': expected bool, got 'maybe'"),
        ("GET /query?n=x", "", InvalidInput, "'n': expected int | None, got 'x'"),
        ("GET /query?f=" + "x" * 200, "", InvalidInput, f"'f': expected float, got '{'x' * 100}'"),
        ("GET /required", "", InvalidInput, "'i' is missing; expected int"),
        ("GET /needed?b=1", "", InvalidInput, "'a' is missing; expected int"),
        ("GET /needed?a=1", "", InvalidInput, "'b' is missing; expected int"),
        ("POST /hinted", '{"other":[2]}', InvalidInput, "'value' is missing; expected Any"),
        ("POST /typed", "true", InvalidInput, "'value': expected "),
        ("POST /markers/k", '{"a":1}', InvalidInput, "'whole' is missing; expected dict"),
        ("POST /markers/k", '{"whole":[]}', InvalidInput, "'whole': expected dict, got '[]'"),
        ("POST /request", "[1]", InvalidInput, "'payload': expected InferenceRequest, got '[1]'"),
        ("POST /any", "{", InvalidInput, "the request body is not valid JSON"),
        ("GET /no-json", "", InvalidOutput, "a custom handler gave dict, which is no JSON: "),
        ("GET /error?status=404", "", ModelNotFound, "in their words"),
        ("GET /error?status=400", "", InvalidInput, "in their words"),
        ("GET /error?status=499", "", InvalidInput, "in their words"),
        ("GET /error?status=399", "", ModelFailed, "in their words"),
        ("GET /error?status=500", "", ModelFailed, "in their words"),
    ],
)
async def test_errors(engine: Engine, line: str, content: str, error: type[DragomanError], message: str) -> None:
    with pytest.raises(error) as found:
        await ask(engine, line, content)
    assert type(found.value) is error
    assert message in found.value.message


@pytest.mark.asyncio(loop_scope="module")
async def test_responses_of_starlette_are_sent_as_they_are(engine: Engine) -> None:
    found = await ask(engine, "GET /response")
    assert found == Handled(b'{"a":1}', "application/json", 201, {"x-a": "b"})
    assert await ask(engine, "GET /typeless") == Handled(b"raw", "", 200, {})
