"""The contracts of Kubernetes and KServe over plain HTTP, with a real server started as the manifests start it.

The test plays the kubelet (probes through start, drain and SIGTERM), the metrics scraper of KServe, and its controller,
which sets the variables of MLServer, its agent, and the endpoint picker. No part of Kubernetes or KServe runs here.
"""

import http.client
import shutil
import socket
import ssl
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import joblib
import numpy as np
import pytest
from cryptography import x509
from prometheus_client.openmetrics.parser import text_string_to_metric_families as open_metrics
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.samples import Sample
from sklearn.linear_model import LinearRegression

import text_models
from access.access_models import KeyFile
from access.authorities import Authority
from e2e.forked_process import TEXT
from e2e.server_process import MODELS, TIMEOUT_S, ServerProcess, free_ports, running_server, wait_until

from .manifests import chart, environment, page_values, pods

PODS = dict(pods())
EXAMPLES = Path(__file__).parents[2] / "examples"
GATED = """
from importlib.util import module_from_spec, spec_from_file_location

spec = spec_from_file_location("trouble", {path!r})
trouble = module_from_spec(spec)
spec.loader.exec_module(trouble)


class Gated(trouble.SlowToLoad):
    pass
"""


UNCHECKED = ssl._create_unverified_context()


class Kubelet:
    """Runs the probes of a container as the kubelet does: GET from a new connection, 200 to 399 is success.

    With HTTPS it does not check the certificate.
    """

    def __init__(self, container: Mapping[str, Any], port: int) -> None:
        self._container = container
        self._port = port

    def probe(self, name: str) -> str:
        """Return "success", "failure" or "refused" of the startup, readiness or liveness probe."""
        get = self._container[f"{name}Probe"]["httpGet"]
        url = f"{get.get('scheme', 'HTTP').lower()}://127.0.0.1:{self._port}{get['path']}"
        request = urllib.request.Request(url, headers={"User-Agent": "kube-probe/1.32", "Connection": "close"})
        try:
            with urllib.request.urlopen(request, timeout=TIMEOUT_S, context=UNCHECKED) as response:
                return "success" if 200 <= response.status < 400 else "failure"
        except urllib.error.HTTPError:
            return "failure"
        except OSError:
            return "refused"


@contextmanager
def container(
    name: str, models: Path, variables: Mapping[str, str] | None = None, *, found: dict[str, Any] | None = None
) -> Iterator[ServerProcess]:
    """Start the server with the arguments and variables of a manifest's container, on free ports."""
    found = found or PODS[name]["containers"][0]
    http_port, grpc_port = free_ports(2)
    ports = {"8080": str(http_port), "8081": str(grpc_port), "9000": str(grpc_port)}
    labels = {"{{.Name}}": "iris", "{{.Labels.modelClass}}": "mlserver_sklearn.SKLearnModel"}
    replaced = {"/mnt/models": str(models), "/models": str(models), **labels}
    values = {**environment(found), **(variables or {})}
    values = {key: ports.get(value, replaced.get(value, value)) for key, value in values.items()}
    words = [replaced.get(word, word) for word in found["args"]]
    words = [word.replace("{{.Name}}", "iris").replace("0.0.0.0", "127.0.0.1") for word in words]
    if "MLSERVER_HTTP_PORT" not in values:
        words += [f"--http-port={http_port}", f"--grpc-port={grpc_port}"]
    process = ServerProcess(*words, environment=values)
    process.http_port, process.grpc_port = http_port, grpc_port
    try:
        yield process
    finally:
        if process.popen.poll() is None:
            process.terminate()
            wait_until(lambda: process.status("/v2/health/ready") != 200, "the drain delay, which `kill` ends")
        process.kill()


def save_iris(folder: Path) -> None:
    """Save a linear model of two features, x + 2 y, as `model.joblib`."""
    folder.mkdir(parents=True, exist_ok=True)
    x = np.array([[0.0, 0.0], [1.0, 0.0], [0.0, 1.0]])
    joblib.dump(LinearRegression().fit(x, x @ [1.0, 2.0]), folder / "model.joblib")


@pytest.mark.parametrize("name", ["kubernetes", "helm", "runtime-dragoman"])
def test_probes_from_start_to_end(tmp_path: Path, name: str) -> None:
    models, gate = tmp_path / "models", tmp_path / "gate"
    models.mkdir()
    (models / "model.py").write_text(GATED.format(path=str(MODELS / "trouble.py")))
    with container(name, models, {"TEST_GATE": str(gate)}) as process, ThreadPoolExecutor(1) as thread:
        kubelet = Kubelet(PODS[name]["containers"][0], process.http_port)
        assert kubelet.probe("startup") in ("refused", "failure")
        wait_until(gate.with_suffix(".begun").exists, "the load")
        wait_until(lambda: kubelet.probe("liveness") == "success", "the open port")
        assert (kubelet.probe("startup"), kubelet.probe("readiness")) == ("failure", "failure")
        gate.touch()
        wait_until(lambda: kubelet.probe("startup") == "success", "the startup probe")
        assert (kubelet.probe("readiness"), kubelet.probe("liveness")) == ("success", "success")

        (model,) = process.request("GET", "/v2/models")[1]["models"]
        assert model == ("iris" if name == "runtime-dragoman" else "models")
        assert process.infer(model, [1.0])[0] == 200
        idle = socket.create_connection(("127.0.0.1", process.http_port))

        process.terminate()  # endpoints are removed at the same time; requests still arrive
        wait_until(lambda: kubelet.probe("readiness") == "failure", "the readiness probe to fail")
        assert kubelet.probe("liveness") == "success"
        assert process.infer(model, [2.0])[0] == 200
        idle.sendall(b"GET /v2/health/live HTTP/1.1\r\nHost: x\r\n\r\n")
        assert idle.recv(4096).startswith(b"HTTP/1.1 200")
        idle.close()
        process.terminate()  # ends the delay, so that the test need not wait for it
        assert thread.submit(process.wait_for_exit).result(TIMEOUT_S) == 0
        assert kubelet.probe("liveness") == "refused"


def test_the_runtime_of_our_own(tmp_path: Path) -> None:
    """The model is behind a link, as KServe's modelcars mount it; its name is that of the InferenceService."""
    (tmp_path / "image" / "models").mkdir(parents=True)
    shutil.copy(EXAMPLES / "iris.onnx", tmp_path / "image" / "models" / "model.onnx")
    (tmp_path / "mnt").symlink_to(tmp_path / "image" / "models")
    with container("runtime-dragoman", tmp_path / "mnt") as process:
        process.wait_until_ready()
        assert process.request("GET", "/v2/models")[1] == {"models": ["iris"]}
        assert process.request("GET", "/v1/models/iris")[:2] == (200, {"name": "iris", "ready": True})
        rows = [[5.1, 3.5, 1.4, 0.2], [6.7, 3.0, 5.2, 2.3]]
        status, body, _ = process.request("POST", "/v1/models/iris:predict", {"instances": rows})
        assert (status, [row["label"] for row in body["predictions"]]) == (200, [0, 2])
        tensor = {"name": "X", "datatype": "FP32", "shape": [2, 4], "data": rows}
        status, body, _ = process.request("POST", "/v2/models/iris/infer", {"inputs": [tensor]})
        (labels,) = (each for each in body["outputs"] if each["name"] == "label")
        assert (status, labels["data"]) == (200, [0, 2])
        check_metrics(process)


def test_the_chart_with_keys_tls_and_an_admin_port(tmp_path: Path) -> None:
    """The pod gets ready, and what the annotations and the ServiceMonitor name can be scraped."""
    pages = page_values()
    objects = {
        each["kind"]: each for each in chart(**pages["keys.yaml"] | pages["tls.yaml"] | pages["monitoring.yaml"])
    }
    template = objects["Deployment"]["spec"]["template"]
    (found,) = template["spec"]["containers"]
    (endpoint,) = objects["ServiceMonitor"]["spec"]["endpoints"]
    shutil.copy(EXAMPLES / "iris.onnx", tmp_path / "iris.onnx")
    secrets = {name: tmp_path / name.removeprefix("/") for name in ("/tls", "/keys")}
    assert {each["mountPath"] for each in found["volumeMounts"]} >= {*secrets}
    for folder in secrets.values():
        folder.mkdir()
    authority = Authority(tmp_path, "authority")
    certificate = authority.issue("server", [x509.DNSName("test.default.svc")])
    certificate.cert.rename(secrets["/tls"] / "tls.crt")
    certificate.key.rename(secrets["/tls"] / "tls.key")
    keys = KeyFile(secrets["/keys"] / "keys.toml")
    scraper = keys.add("prometheus", ["read"])

    (admin_port,) = free_ports(1)
    arguments = [word.replace("=/", f"={tmp_path}/") for word in found["args"] if not word.startswith("--admin-port")]
    arguments = [str(tmp_path / "iris.onnx") if word == "/models" else word for word in arguments]
    started = {"args": [*arguments, f"--admin-port={admin_port}"], "env": []}
    with container("helm", tmp_path, {"DRAGOMAN_CONTROL_TOKEN": "token of the secret"}, found=started) as process:
        kubelet = Kubelet(found, process.http_port)
        wait_until(lambda: kubelet.probe("startup") == "success", "the startup probe")
        assert (kubelet.probe("readiness"), kubelet.probe("liveness")) == ("success", "success")

        ports = {each["name"]: each["containerPort"] for each in found["ports"]}
        annotations = template["metadata"]["annotations"]
        assert annotations["prometheus.io/scheme"] == endpoint["scheme"] == "https"
        assert int(annotations["prometheus.io/port"]) == ports[endpoint["targetPort"]] == ports["admin"]
        trusted = ssl.create_default_context(cafile=str(authority.file))

        def status(port: int, path: str, key: str) -> int:
            connection = http.client.HTTPSConnection("127.0.0.1", port, timeout=TIMEOUT_S, context=trusted)
            connection.sock = trusted.wrap_socket(
                socket.create_connection(("127.0.0.1", port)), server_hostname=endpoint["tlsConfig"]["serverName"]
            )
            connection.request("GET", path, headers={"Authorization": f"Bearer {key}"})
            response = connection.getresponse()
            response.read()
            connection.close()
            return response.status

        assert status(admin_port, endpoint["path"], scraper) == 200
        assert status(admin_port, endpoint["path"], "wrong") == 401
        assert status(process.http_port, endpoint["path"], scraper) == 403
        assert status(process.http_port, "/v2/models/iris", scraper) == 200
        renewed = keys.add("another", ["read"])
        wait_until(lambda: status(process.http_port, "/v2/models/iris", renewed) == 200, "the new key")


def check_metrics(process: ServerProcess) -> None:
    """Scrape as Prometheus does, and as KServe's qpext, which forwards its headers but parses the text format only."""
    accept = "application/openmetrics-text;version=1.0.0;q=0.75,text/plain;version=0.0.4;q=0.5,*/*;q=0.1"
    for headers in ({"Accept": accept}, {}):
        status, text, found = process.request("GET", "/metrics", headers=headers)
        is_open = found["content-type"].startswith("application/openmetrics-text")
        assert (status, is_open) == (200, bool(headers))
        types = {line.split()[3] for line in text.decode().splitlines() if line.startswith("# TYPE ")}
        assert types <= {"counter", "gauge", "histogram", "summary", "untyped"}
        parse = open_metrics if is_open else text_string_to_metric_families
        families = {family.name: family for family in parse(text.decode())}
        calls = families["dragoman_call_duration_seconds"].samples
        assert sum(s.value for s in calls if s.name.endswith("_count") and s.labels["model"] == "iris") == 2


@pytest.fixture(scope="module")
def text_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return text_models.make_model(tmp_path_factory.mktemp("text") / "llama")


def scrape(process: ServerProcess) -> dict[str, list[Sample]]:
    """Return the samples of each metric, as the endpoint picker reads them: from the text format, by name."""
    found: dict[str, list[Sample]] = {}
    for family in text_string_to_metric_families(process.request("GET", "/metrics")[1].decode()):
        for sample in family.samples:
            found.setdefault(sample.name, []).append(sample)
    return found


def test_the_endpoint_picker_finds_the_metrics_of_vllm(text_model: Path) -> None:
    """llm-d's endpoint picker scrapes each pod: queued and running requests, use and size of the key-value cache."""
    with running_server(str(text_model), "--metrics-as", "vllm", imports=TEXT) as process:
        body = {"model": "llama", "prompt": "one two", "max_tokens": 4}
        headers = {"x-gateway-destination-endpoint": process.url, "x-session-id": "s"}
        assert process.request("POST", "/v1/completions", body, headers)[0] == 200
        samples = scrape(process)
        for name in ("vllm:num_requests_waiting", "vllm:num_requests_running", "vllm:kv_cache_usage_perc"):
            (sample,) = samples[name]
            assert (sample.labels["model_name"], sample.value) == ("llama", 0.0), name
        (info,) = samples["vllm:cache_config_info"]
        assert int(info.labels["block_size"]) > 0
        assert int(info.labels["num_gpu_blocks"]) > 0


def test_the_endpoint_picker_finds_the_metrics_of_triton() -> None:
    with running_server(str(EXAMPLES / "iris.onnx"), "--metrics-as", "triton") as process:
        body = {"instances": [[5.1, 3.5, 1.4, 0.2]]}
        assert process.request("POST", "/v1/models/iris:predict", body)[0] == 200
        samples = scrape(process)
        assert [s.value for s in samples["nv_inference_pending_request_count"]] == [0.0]
        assert [s.value for s in samples["nv_inference_exec_count"]] == [1.0]


@pytest.mark.parametrize("given", [{"MLSERVER_MODEL_NAME": "iris", "MLSERVER_MODEL_URI": "/mnt/models"}])
def test_the_runtime_that_replaces_mlserver(tmp_path: Path, given: dict[str, str]) -> None:
    """KServe's controller sets these variables for a runtime with `server-type: mlserver` and gives no PATH."""
    save_iris(tmp_path / "models")
    with container("runtime-mlserver", tmp_path / "models", given) as process:
        process.wait_until_ready()
        assert process.request("GET", "/v2/models/iris/ready")[0] == 200
        tensor = {"name": "predict", "datatype": "FP64", "shape": [1, 2], "data": [1, 1]}
        status, body, _ = process.request("POST", "/v2/models/iris/infer", {"inputs": [tensor]})
        assert (status, round(body["outputs"][0]["data"][0], 6)) == (200, 3.0)


def test_the_agent_of_kserve_loads_and_unloads_models(tmp_path: Path) -> None:
    """The agent of a multi-model pod writes a folder, then asks `localhost` to load it, with `{}` and without a token.

    To unload, it deletes the folder first. Its proxy and Knative's forward requests of clients from loopback too.
    """
    flags = ("--no-load-at-start", "--control-loopback", "--host", "127.0.0.1")
    with running_server(str(tmp_path / "models"), *flags) as process:

        def control(verb: str, **headers: str) -> int:
            local = {"Host": f"localhost:{process.http_port}", "Content-Type": "application/json"}
            path = f"/v2/repository/models/iris/{verb}"
            return process.request("POST", path, b"{}", {**local, **headers})[0]

        assert process.status("/v2/health/ready") == 200
        assert control("load") == 404
        (tmp_path / "models" / "iris").mkdir(parents=True)
        shutil.copy(EXAMPLES / "iris.onnx", tmp_path / "models" / "iris" / "model.onnx")
        assert control("load", **{"X-Forwarded-For": "10.0.0.5"}) == 403
        assert control("load", Host="models.example") == 403
        assert process.status("/v2/models/iris") == 404
        assert control("load") == 200
        body = {"instances": [[5.1, 3.5, 1.4, 0.2]]}
        assert process.request("POST", "/v1/models/iris:predict", body)[0] == 200
        shutil.rmtree(tmp_path / "models" / "iris")
        assert control("unload", **{"X-Forwarded-For": "10.0.0.5"}) == 403
        assert process.request("POST", "/v1/models/iris:predict", body)[0] == 200
        assert control("unload") == 200
        assert process.request("POST", "/v1/models/iris:predict", body)[0] == 404
        assert control("unload") == 200  # again
        assert process.status("/v2/health/ready") == 200
