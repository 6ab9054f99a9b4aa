"""The rules, the dashboard and the queries of docs/monitoring.md: run by Prometheus against a server that it scrapes.

Without Prometheus, each query is compared with the samples and labels of the server's metrics.
"""

import json
import math
import re
import shutil
import socket
import subprocess
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import httpx2
import pytest
import yaml
from prometheus_client.parser import text_string_to_metric_families

import dragoman
from access.access_models import KeyFile, bearer
from e2e.server_process import wait_until
from text_server import ReverseModel

from .manifests import load

ROOT = Path(__file__).parents[2]
MONITORING = ROOT / "deploy" / "monitoring"
RULES = MONITORING / "rules.yaml"
PAGE = ROOT / "docs" / "monitoring.md"
NAMES = re.compile(r"\b((?:dragoman|process)_\w+)")
# Metrics of what a machine for tests may lack: a GPU, an engine with a language model, a collector, restarts.
ABSENT = re.compile(
    r"dragoman_(gpu|traces|logs|access_log|text_queue|text_batch_size|text_cache_usage|text_preemptions|text_token_seconds"
    r"|text_time_to_first_token|text_inter_token|text_finished)"
)
# Labels that a ServiceMonitor of the Prometheus Operator adds.
OF_OPERATOR = {"namespace": "default", "service": "dragoman", "pod": "dragoman-0"}
needs_promtool = pytest.mark.skipif(
    shutil.which("promtool") is None, reason="promtool is not installed (Debian: apt-get install prometheus)"
)
needs_prometheus = pytest.mark.skipif(
    shutil.which("prometheus") is None, reason="Prometheus is not installed (Debian: apt-get install prometheus)"
)
MODEL = """
import dragoman


class Model(dragoman.Model):
    inputs = (dragoman.TensorSpec("x", dragoman.FP64, (-1, 1)),)
    batched = True
    placement = "process"

    def infer(self, call):
        return {"y": call.inputs["x"].data}
"""
X = {"inputs": [{"name": "x", "datatype": "FP64", "shape": [1, 1], "data": [1.0]}]}
TEXT = {"model": "ReverseModel", "prompt": "one two three", "max_tokens": 9, "stream": True}


class Query(NamedTuple):
    """A query, and where it is."""

    where: str
    text: str


def page_queries() -> list[Query]:
    """Return the queries of the blocks `promql`, each after an empty line or a comment, or continued by indentation."""
    found = []
    for block in re.findall(r"```promql\n(.*?)```", PAGE.read_text(), re.DOTALL):
        lines: list[str] = []
        for line in block.splitlines():
            if line.startswith(" "):
                lines[-1] += line
            elif line and not line.startswith("#"):
                lines.append(line)
        found += [Query("docs/monitoring.md", line) for line in lines]
    return found


def autoscaling_queries() -> list[Query]:
    """Return the queries of KEDA's ScaledObject and of prometheus-adapter, for one server; see docs/kubernetes.md."""
    (page,) = re.findall(r"```promql\n(.*?)\n```", (ROOT / "docs" / "kubernetes.md").read_text(), re.DOTALL)
    (scaled,) = load("kubernetes-autoscaling/scaledobject.yaml")
    (trigger,) = scaled["spec"]["triggers"]
    assert trigger["metadata"]["query"] == page
    (adapter,) = load("kubernetes-autoscaling/adapter.yaml")
    (rule,) = adapter["rules"]["custom"]
    text = rule["metricsQuery"].replace("<<.Series>>", rule["seriesQuery"].partition("{")[0])
    of_pods = text.replace("<<.LabelMatchers>>", 'namespace="default",pod=~"dragoman-0"').replace("<<.GroupBy>>", "pod")
    return [
        Query("scaledobject.yaml", page),
        Query("adapter.yaml", rule["seriesQuery"]),
        Query("adapter.yaml", of_pods),
    ]


def dashboard_queries() -> list[Query]:
    """Return the queries of the dashboard, with values for its variables."""
    values = {"$job": ".*", "$namespace": ".*", "$instance": ".*", "$model": ".*", "[$__rate_interval]": "[1m]"}
    found = []
    for panel in dashboard()["panels"]:
        for target in panel.get("targets", ()):
            text = target["expr"]
            for name, value in values.items():
                text = text.replace(name, value)
            found.append(Query(panel["title"], text))
    return found


def dashboard() -> Any:
    return json.loads((MONITORING / "grafana-dashboard.json").read_text())


def rules() -> list[dict[str, Any]]:
    return [rule for group in yaml.safe_load(RULES.read_text())["groups"] for rule in group["rules"]]


def rule_queries() -> list[Query]:
    """Return the expressions of the rules, with their names."""
    return [Query(rule.get("record") or rule["alert"], rule["expr"]) for rule in rules()]


# --- the files ----------------------------------------------------------------------------------------------------


def test_all_queries_name_metrics_that_the_documentation_lists() -> None:
    known = {*NAMES.findall((ROOT / "docs" / "metrics.md").read_text())}
    recorded = {rule["record"] for rule in rules() if "record" in rule}
    queries = [*page_queries(), *dashboard_queries(), *rule_queries()]
    assert len(queries) > 80
    for where, text in queries:
        of_rules = {*re.findall(r"\bjob_model\w*:\w+:\w+", text)}
        assert of_rules <= recorded, where
        used = {re.sub(r"_(bucket|sum|count)$", "", name) for name in NAMES.findall(re.sub(r"\w+:\w+:\w+", "", text))}
        assert used <= known, f"{where}: {used - known}"
        assert used or of_rules or "up{" in text, where


def test_each_alert_has_a_severity_a_summary_and_a_page() -> None:
    alerts = {rule["alert"]: rule for rule in rules() if "alert" in rule}
    headings = re.findall(r"^## (\w+)$", (ROOT / "docs" / "alerts.md").read_text(), re.MULTILINE)
    assert headings == [*alerts]
    for name, rule in alerts.items():
        assert rule["labels"]["severity"] in ("page", "ticket")
        assert rule["annotations"]["summary"]
        assert rule["annotations"]["runbook_url"] == f"https://dragoman.example/docs/alerts/#{name.lower()}"


def test_panels_follow_the_variables_and_do_not_overlap() -> None:
    found = dashboard()
    assert [v["name"] for v in found["templating"]["list"]] == ["datasource", "job", "namespace", "instance", "model"]
    cells = []
    for panel in found["panels"]:
        box = panel["gridPos"]
        cells += [(box["x"] + i, box["y"] + j) for i in range(box["w"]) for j in range(box["h"])]
        for target in panel.get("targets", ()):
            names = NAMES.findall(target["expr"])
            assert target["expr"].count('job=~"$job",namespace=~"$namespace|",instance=~"$instance"') == len(names)
            assert target["datasource"]["uid"] == "${datasource}"
    assert len(cells) == len({*cells})


@needs_promtool
def test_promtool_accepts_the_rules_and_their_cases_hold() -> None:
    for command in (("check", "rules", str(RULES)), ("test", "rules", str(MONITORING / "rules_test.yaml"))):
        done = subprocess.run(["promtool", *command], capture_output=True, text=True, timeout=60, check=False)
        assert done.returncode == 0, done.stdout + done.stderr


# --- a server and Prometheus ----------------------------------------------------------------------------------------


class Monitored:
    """A server with models of each kind, and clients that give all of its counters something to count."""

    def __init__(self, folder: Path) -> None:
        for version in ("1", "2"):
            (folder / "models" / "canary" / version).mkdir(parents=True)
            (folder / "models" / "canary" / version / "model.py").write_text(MODEL)
        settings = '[model]\nmax_batch_size = 4\nversion_weights = {"1" = 1, "2" = 1}\n'
        (folder / "models" / "canary" / "dragoman.toml").write_text(settings)
        (folder / "models" / "broken").mkdir()
        (folder / "models" / "broken" / "model.py").write_text("raise ValueError('cannot be imported')")
        self.keys = KeyFile(folder / "keys.toml")
        self.key = self.keys.add("reports", ("infer", "read", "admin"))
        models = (str(folder / "models"), ReverseModel)
        self.server = dragoman.Server(*models, http_port=0, grpc_port=-1, api_keys=str(self.keys.path))
        self.server.start()
        self.client = httpx2.Client(base_url=self.server.http_url, headers=dict(bearer(self.key)), timeout=60)
        assert self.client.post("/v2/repository/models/broken/load").status_code == 400

    def send(self) -> None:
        """Send requests of each kind; of 64 small ones, the parsing of one is measured."""
        for _ in range(8):
            assert self.client.post("/v2/models/canary/infer", json=X).status_code == 200
        for _ in range(64):
            assert self.client.get("/v2/models/canary").status_code == 200
        assert self.client.post("/v1/completions", json=TEXT).status_code == 200
        assert self.client.get("/v2", headers={"authorization": "Bearer wrong"}).status_code in (401, 429)

    def samples(self) -> list[Any]:
        text = self.client.get("/metrics").text
        return [sample for family in text_string_to_metric_families(text) for sample in family.samples]

    def close(self) -> None:
        self.client.close()
        self.server.close()


@pytest.fixture(scope="module")
def monitored(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Monitored]:
    found = Monitored(tmp_path_factory.mktemp("monitored"))
    try:
        found.send()
        yield found
    finally:
        found.close()


def test_each_query_selects_samples_of_the_server(monitored: Monitored) -> None:
    """By labels that these have; this needs no Prometheus."""
    queries = [*page_queries(), *dashboard_queries(), *rule_queries(), *autoscaling_queries()]
    samples = monitored.samples()
    checked = [query for query in queries if not ABSENT.search(query.text) and check_query(query, samples)]
    assert len(checked) > 60


def check_query(query: Query, samples: list[Any]) -> bool:
    """Check that each metric of a query has a sample, with the labels by which it selects and groups."""
    text = re.sub(r"\w+:\w+:\w+", "", query.text)
    grouped = {label.strip() for group in re.findall(r"by \(([^)]*)\)", text) for label in group.split(",")}
    selectors = re.findall(r"\b((?:dragoman|process)_\w+)(?:\{([^}]*)\})?", text)
    added = {"job", "instance", *OF_OPERATOR}  # by Prometheus
    for name, matchers in selectors:
        labels = {*re.findall(r"(\w+)(?:=~|!~|!=|=)", matchers)} - added
        found = [sample for sample in samples if sample.name == name]
        assert found, f"no sample of {name} in {query}"
        assert any({*sample.labels} >= labels | (grouped - added) for sample in found), query
    return bool(selectors)


class Prometheus:
    """A running Prometheus server that scrapes a server four times a second and knows the rules."""

    def __init__(self, folder: Path, monitored: Monitored) -> None:
        with socket.create_server(("127.0.0.1", 0)) as free:
            port = free.getsockname()[1]
        self.url = f"http://127.0.0.1:{port}"
        # Prometheus waits for up to an interval before it evaluates a group.
        (folder / "rules.yaml").write_text(RULES.read_text().replace("interval: 30s", "interval: 1s"))
        configuration = {
            "global": {"scrape_interval": "250ms", "evaluation_interval": "1s"},
            "rule_files": [str(folder / "rules.yaml")],
            "scrape_configs": [
                {
                    "job_name": "dragoman",
                    "authorization": {"credentials": monitored.key},
                    "static_configs": [
                        {"targets": [monitored.server.http_url.removeprefix("http://")], "labels": OF_OPERATOR}
                    ],
                }
            ],
        }
        (folder / "prometheus.yml").write_text(yaml.safe_dump(configuration))
        self._log = (folder / "log").open("w")
        self._process = subprocess.Popen(
            [
                "prometheus",
                f"--config.file={folder / 'prometheus.yml'}",
                f"--storage.tsdb.path={folder / 'data'}",
                f"--web.listen-address=127.0.0.1:{port}",
            ],
            stdout=self._log,
            stderr=self._log,
        )
        wait_until(lambda: self._get("/-/ready") is not None, "Prometheus")

    def _get(self, path: str) -> Any:
        try:
            with urllib.request.urlopen(self.url + path, timeout=10) as response:
                return response.read()
        except (urllib.error.URLError, ConnectionError):
            return None

    def values(self, query: str) -> list[float]:
        """Return the values of the series that a query finds. Raises AssertionError if it is invalid."""
        body = urllib.parse.urlencode({"query": query}).encode()
        try:
            with urllib.request.urlopen(f"{self.url}/api/v1/query", body, timeout=10) as response:
                answer = json.loads(response.read())
        except urllib.error.HTTPError as error:
            raise AssertionError(f"{query}: {error.read().decode()}") from error
        return [float(each["value"][1]) for each in answer["data"]["result"]]

    def scrapes(self) -> float:
        """Return the number of scrapes so far."""
        return sum(self.values("count_over_time(up[1h])"))

    def rules(self) -> list[dict[str, Any]]:
        """Return the rules with their health, once each has been evaluated."""
        answer = json.loads(self._get("/api/v1/rules"))
        return [rule for group in answer["data"]["groups"] for rule in group["rules"]]

    def close(self) -> None:
        self._process.terminate()
        self._process.wait()
        self._log.close()


@pytest.fixture(scope="module")
def prometheus(monitored: Monitored, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Prometheus]:
    found = Prometheus(tmp_path_factory.mktemp("prometheus"), monitored)
    try:
        yield found
    finally:
        found.close()


@needs_prometheus
def test_each_query_of_the_page_and_the_dashboard_returns_data(monitored: Monitored, prometheus: Prometheus) -> None:
    """Data are series of numbers; a ratio without requests is none."""
    queries = [*page_queries(), *dashboard_queries(), *autoscaling_queries()]
    for query in queries:
        prometheus.values(query.text)  # also those for what a machine for tests lacks are valid
    left = [query for query in queries if not ABSENT.search(query.text)]
    assert len(left) > 50
    end_s = time.monotonic() + 60
    while left:
        assert time.monotonic() < end_s, left
        monitored.send()
        before = prometheus.scrapes()
        wait_until(lambda before=before: prometheus.scrapes() > before, "a scrape")  # type: ignore[misc]
        left = [query for query in left if not has_data(prometheus.values(query.text))]


def has_data(values: list[float]) -> bool:
    return bool(values) and not all(map(math.isnan, values))


@needs_prometheus
def test_rules_are_evaluated(prometheus: Prometheus) -> None:
    evaluated: Callable[[], Any] = lambda: (found := prometheus.rules()) and all(r["health"] == "ok" for r in found)  # noqa: E731
    wait_until(evaluated, "all rules")
    assert {rule["name"] for rule in prometheus.rules()} == {each.where for each in rule_queries()}
    ratio = "job_model:dragoman_calls_failed:ratio_rate5m"
    wait_until(lambda: has_data(prometheus.values(ratio)), ratio)
    pending = 'ALERTS{alertname="DragomanModelNotReady",model="broken"}'
    wait_until(lambda: prometheus.values(pending) == [1.0], pending)
