"""`deploy/proxies` with the real nginx, HAProxy and Envoy: two servers behind each, restarted in turn under load."""

import http.client
import itertools
import json
import shutil
import struct
import subprocess
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

import grpc
import pytest
import yaml

from dragoman.formats import grpc_messages as m
from e2e.server_process import TIMEOUT_S, ServerProcess, free_ports, wait_until

PROXIES = Path(__file__).parents[2] / "deploy" / "proxies"
MODELS = Path(__file__).parent / "fleet_models.py"
TOOLS = {"nginx": "nginx.conf", "haproxy": "haproxy.cfg", "envoy": "envoy.yaml"}
# Seconds between the calls of a client, so that servers that start beside it have the processor too.
_PAUSE_S = 0.01
INFER = "/inference.GRPCInferenceService/ModelInfer"


needs = {tool: pytest.mark.skipif(shutil.which(tool) is None, reason=f"needs {tool}") for tool in TOOLS}
each_tool = pytest.mark.parametrize("tool", [pytest.param(tool, marks=needs[tool]) for tool in TOOLS])


class Proxy:
    """A proxy with its file of `deploy/proxies`, whose addresses and intervals are replaced."""

    def __init__(self, tool: str, servers: Sequence[int], folder: Path) -> None:
        self.http_port, self.grpc_port = free_ports(2)
        if tool == "envoy":
            self.grpc_port = self.http_port
        self._connections: list[http.client.HTTPConnection] = []
        text = (PROXIES / TOOLS[tool]).read_text()
        for written, port in zip(("10.0.0.1:8080", "10.0.0.2:8080"), servers, strict=True):
            text = text.replace(written, f"127.0.0.1:{port}")
            host, _, number = written.partition(":")
            text = text.replace(f"address: {host}, port_value: {number}", f"address: 127.0.0.1, port_value: {port}")
        text = text.replace("address: 0.0.0.0, port_value: 8080", f"address: 127.0.0.1, port_value: {self.http_port}")
        text = text.replace("interval: 1s", "interval: 0.1s")  # also of no traffic
        for written, port in {"8080": self.http_port, "8081": self.grpc_port}.items():
            text = text.replace(f"listen {written}", f"listen 127.0.0.1:{port}")
            text = text.replace(f"bind :{written}", f"bind 127.0.0.1:{port}")
        text = text.replace("inter 1s", "inter 100ms").replace("fail_timeout=2s", "fail_timeout=1s")
        kinds = ("client_body", "proxy", "fastcgi", "uwsgi", "scgi")
        temporary = "".join(f"{kind}_temp_path {folder / kind};" for kind in kinds)
        text = text.replace("access_log off;", f"access_log off; {temporary}").replace("processes auto", "processes 1")
        file = folder / TOOLS[tool]
        file.write_text(text)
        command = {
            "nginx": nginx(folder, file, "daemon off;"),
            "haproxy": ["haproxy", "-db", "-f", str(file)],
            "envoy": ["envoy", "-c", str(file), "--disable-hot-restart", "--concurrency", "1", "--log-level", "error"],
        }
        self.process = subprocess.Popen(command[tool])

    def close(self) -> None:
        for each in self._connections:
            each.close()
        self.process.terminate()
        self.process.wait()

    def connect(self) -> http.client.HTTPConnection:
        """Return a connection, which is closed at the end."""
        self._connections.append(http.client.HTTPConnection("127.0.0.1", self.http_port, timeout=TIMEOUT_S))
        return self._connections[-1]

    def channel(self) -> grpc.Channel:
        return grpc.insecure_channel(f"127.0.0.1:{self.grpc_port}")

    def is_ready(self) -> bool:
        """Whether both servers answer. Raises AssertionError if the proxy has ended."""
        assert self.process.poll() is None
        try:
            connection = self.connect()
            return {infer(connection, x) for x in range(16)} == {"a", "b"}
        except (OSError, AssertionError):
            return False


def nginx(folder: Path, file: Path, directives: str = "") -> list[str]:
    return ["nginx", "-p", str(folder), "-c", str(file), "-e", "stderr", "-g", f"pid {folder / 'pid'};{directives}"]


def post(connection: http.client.HTTPConnection, path: str, body: Any, session: str = "") -> tuple[int, Any]:
    """Send a request on a connection that is kept; return the status and the body."""
    headers = {"content-type": "application/json"} | ({"X-Session-Id": session} if session else {})
    connection.request("POST", path, json.dumps(body), headers)
    response = connection.getresponse()
    return response.status, json.loads(response.read() or b"null")


def infer(connection: http.client.HTTPConnection, x: float, session: str = "") -> str:
    """Return the name of the server that has computed a call. Raises AssertionError for a wrong response."""
    tensor = {"name": "x", "datatype": "FP64", "shape": [1], "data": [x]}
    status, body = post(connection, "/v2/models/Twice/infer", {"inputs": [tensor]}, session)
    assert status == 200, body
    y, server = (output["data"] for output in body["outputs"])
    assert y == [2 * x]
    return str(server[0])


def infer_grpc(send: Any, x: float) -> str:
    """The same over gRPC."""
    tensor = {"name": "x", "datatype": "FP64", "shape": [1], "contents": {"fp64_contents": [x]}}
    data = send(m.ModelInferRequest(model_name="Twice", inputs=[tensor]).SerializeToString(), timeout=TIMEOUT_S)
    y, server = m.ModelInferResponse.FromString(data).raw_output_contents
    assert struct.unpack("<d", y) == (2 * x,)
    return bytes(server[4:]).decode()  # after its length


class Fleet:
    """Two servers, `a` and `b`, and each proxy that is installed."""

    def __init__(self, folder: Path) -> None:
        self.ports = dict(zip("ab", free_ports(2), strict=True))
        self.servers: dict[str, ServerProcess] = {}
        self.proxies: dict[str, Proxy] = {}
        self._folder = folder

    def start(self, name: str) -> ServerProcess:
        """Start a server on its port, without waiting for it."""
        flags = ("--grpc-port", str(free_ports(1)[0]), "--drain-delay-s", "0.5")
        models = [f"{MODELS}:{each}" for each in ("Twice", "Steps", "Named")]
        environment = {"SERVER_NAME": name}
        server = ServerProcess(*models, "--http-port", str(self.ports[name]), *flags, environment=environment)
        server.http_port = self.ports[name]
        self.servers[name] = server
        return server

    def start_proxies(self) -> None:
        for tool in TOOLS:
            if shutil.which(tool):
                folder = self._folder / tool
                folder.mkdir()
                self.proxies[tool] = Proxy(tool, [*self.ports.values()], folder)

    def close(self) -> None:
        for proxy in self.proxies.values():
            proxy.close()
        for server in self.servers.values():
            server.kill()


@pytest.fixture(scope="module")
def fleet(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    fleet = Fleet(tmp_path_factory.mktemp("proxies"))
    try:
        for name in "ab":
            fleet.start(name)
        for server in fleet.servers.values():
            server.wait_until_ready()
        fleet.start_proxies()
        for proxy in fleet.proxies.values():
            wait_until(proxy.is_ready, "both servers behind the proxy")
        yield fleet
    finally:
        fleet.close()


@pytest.fixture
def proxy(fleet: Fleet, tool: str) -> Proxy:
    return fleet.proxies[tool]


class Load:
    """Clients that send one call after the other, each in a thread, until `stop`."""

    def __init__(self, *clients: Callable[[float], str]) -> None:
        self.errors: list[BaseException] = []
        self.served: list[list[str]] = [[] for _ in clients]  # by client: the servers that answered
        self._stopping = threading.Event()
        self._threads = [
            threading.Thread(target=self._run, args=each) for each in zip(clients, self.served, strict=True)
        ]
        for thread in self._threads:
            thread.start()

    def _run(self, client: Callable[[float], str], served: list[str]) -> None:
        for x in itertools.count():
            if self._stopping.wait(_PAUSE_S):
                return
            try:
                served.append(client(float(x)))
            except BaseException as error:
                self.errors.append(error)

    def wait_for(self, name: str) -> None:
        """Wait until this server has answered each client from now on."""
        before = [len(each) for each in self.served]

        def answers() -> bool:
            return all(name in each[count:] for each, count in zip(self.served, before, strict=True))

        wait_until(lambda: self.errors or answers(), f"calls at server {name}")

    def stop(self) -> None:
        """Wait for the last calls."""
        self._stopping.set()
        for thread in self._threads:
            thread.join(TIMEOUT_S)


@pytest.mark.skipif(not any(map(shutil.which, TOOLS)), reason="needs nginx, haproxy or envoy")
def test_a_restart_of_each_server_under_load_loses_no_call(fleet: Fleet) -> None:
    with ExitStack() as stack:
        clients: list[Callable[[float], str]] = []
        for tool, proxy in fleet.proxies.items():
            clients += [partial(infer, proxy.connect()) for _ in range(3)]
            if (
                tool != "nginx"
            ):  # which cannot see that a server loads its models: it answers UNAVAILABLE with status 200
                clients.append(partial(infer_grpc, stack.enter_context(proxy.channel()).unary_unary(INFER)))
        load = Load(*clients)
        stack.callback(load.stop)
        for name in "ab":
            fleet.servers[name].terminate()
            assert fleet.servers[name].wait_for_exit() == 0
            fleet.servers[name].kill()
            fleet.start(name).wait_until_ready()
            load.wait_for(name)
        load.stop()
    assert load.errors == []
    assert min(map(len, load.served)) > 20


@each_tool
def test_a_session_stays_on_one_server(proxy: Proxy) -> None:
    connection = proxy.connect()
    found = {f"s{n}": {infer(connection, x, f"s{n}") for x in range(4)} for n in range(20)}
    assert {len(servers) for servers in found.values()} == {1}
    assert set.union(*found.values()) == {"a", "b"}
    with proxy.channel() as channel:
        for session, servers in found.items():
            call = partial(channel.unary_unary(INFER), metadata=[("x-session-id", session)])
            assert {infer_grpc(call, x) for x in range(2)} == servers


@needs["haproxy"]
def test_prompts_that_begin_alike_stay_on_one_server_behind_haproxy(fleet: Fleet) -> None:
    connection = fleet.proxies["haproxy"].connect()

    def server(prompt: str, session: str = "") -> str:
        body = {"model": "Named", "prompt": prompt, "max_tokens": 1}
        status, answer = post(connection, "/v1/completions", body, session)
        assert status == 200, answer
        return str(answer["choices"][0]["text"])

    starts = {n: {server(f"{n} {'x' * 1200} {x}") for x in range(3)} for n in range(20)}
    assert {len(servers) for servers in starts.values()} == {1}
    assert set.union(*starts.values()) == {"a", "b"}
    assert len({server(f"{n}", session="one") for n in range(10)}) == 1  # the header comes first


@each_tool
def test_streams_arrive_chunk_by_chunk(proxy: Proxy, tmp_path: Path) -> None:
    connection = proxy.connect()
    connection.request("POST", "/v2/models/Steps/generate_stream", json.dumps({"file": str(tmp_path / "go")}))
    response = connection.getresponse()
    assert response.status == 200
    assert json.loads(response.readline().removeprefix(b"data:"))["i"] == 0  # while the model waits for the file
    (tmp_path / "go").touch()
    assert b'"i":1' in response.read().replace(b" ", b"")


@each_tool
@pytest.mark.parametrize(
    "request_line",
    [
        "GET /metrics",
        "GET /metrics/",
        "GET /server/metrics",
        "POST /v2/repository/index",
        "POST /v2/repository/models/Twice/load",
        "POST /models",
        "DELETE /models/Twice",
    ],
)
def test_metrics_and_model_control_are_not_for_clients(proxy: Proxy, request_line: str) -> None:
    connection = proxy.connect()
    method, path = request_line.split()
    connection.request(method, path)
    response = connection.getresponse()
    assert (response.status, b"dragoman" in response.read()) == (404, False)


@each_tool
def test_model_control_and_reflection_over_grpc_are_not_for_clients(proxy: Proxy) -> None:
    """Without a token the server itself would answer PERMISSION_DENIED."""
    paths = (
        "/inference.GRPCInferenceService/RepositoryModelUnload",
        "/grpc.reflection.v1.ServerReflection/ServerReflectionInfo",
    )
    with proxy.channel() as channel:
        for path in paths:
            with pytest.raises(grpc.RpcError) as caught:
                channel.unary_unary(path)(b"", timeout=TIMEOUT_S)
            assert caught.value.code() == grpc.StatusCode.UNIMPLEMENTED


@each_tool
def test_the_files_are_valid(tool: str, tmp_path: Path) -> None:
    file = PROXIES / TOOLS[tool]
    check = {
        "nginx": [*nginx(tmp_path, file), "-t"],
        "haproxy": ["haproxy", "-c", "-f", str(file)],
        "envoy": ["envoy", "--mode", "validate", "-c", str(file)],
    }
    done = subprocess.run(check[tool], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "[warn" not in (done.stdout + done.stderr).lower()


def test_envoy_asks_each_server_for_its_readiness() -> None:
    """As far as YAML tells: each route leads to a cluster, each cluster has health checks and the same two servers."""
    resources = yaml.safe_load((PROXIES / "envoy.yaml").read_text())["static_resources"]
    clusters = {cluster["name"]: cluster for cluster in resources["clusters"]}
    (chain,) = resources["listeners"][0]["filter_chains"]
    (host,) = chain["filters"][0]["typed_config"]["route_config"]["virtual_hosts"]
    routes = [route["route"] for route in host["routes"] if "route" in route]
    assert {route["cluster"] for route in routes} == set(clusters)
    for cluster in clusters.values():
        assert [check["http_health_check"]["path"] for check in cluster["health_checks"]] == ["/v2/health/ready"]
    assert len({str(cluster["load_assignment"]["endpoints"]) for cluster in clusters.values()}) == 1
