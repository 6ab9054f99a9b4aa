"""The page on operation, followed from an empty folder to an upgrade: its commands run in one shell, in their order."""

import os
import re
import ssl
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import requests
import yaml
from prometheus_client.parser import text_string_to_metric_families

from e2e.otlp_receiver import SERVER, OtlpReceiver
from e2e.server_process import free_ports, wait_until

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "operate.md"
PORTS = ("8080", "8443", "9443", "8444", "9444")
BODY = {"inputs": [{"name": "area", "datatype": "FP64", "shape": [1], "data": [80]}]}
TIMEOUT_S = 60


def sections(text: str) -> Iterator[tuple[str, dict[str, list[str]]]]:
    """Yield each heading with the code blocks below it by language."""
    for part in re.split(r"^#{2,3} ", text, flags=re.M)[1:]:
        blocks: dict[str, list[str]] = {}
        for language, code in re.findall(r"^```(\w+)\n(.*?)^```", part, re.S | re.M):
            blocks.setdefault(language, []).append(code)
        yield part.partition("\n")[0], blocks


class Shell:
    """A bash that stays open. A command that fails ends it, and the test."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        inherited = {name: value for name, value in os.environ.items() if not name.startswith(("DRAGOMAN_", "OTEL_"))}
        environment = inherited | {"PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}
        self._bash = subprocess.Popen(
            ["bash", "-euo", "pipefail"], cwd=folder, env=environment, text=True, start_new_session=True,
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        )  # fmt: skip

    def run(self, commands: str) -> str:
        """Run commands; return what they print."""
        assert self._bash.stdin is not None
        assert self._bash.stdout is not None
        self._bash.stdin.write(f"{commands}\necho; echo END-OF-BLOCK\n")
        self._bash.stdin.flush()
        lines = [*iter(self._bash.stdout.readline, "END-OF-BLOCK\n")] if self._bash.poll() is None else []
        assert self._bash.poll() is None or lines, commands
        return "".join(lines)

    def close(self) -> None:
        """End the shell and what still runs in it."""
        self.run("kill $(jobs -p) 2> /dev/null || true")
        self._bash.communicate("exit\n", timeout=TIMEOUT_S)


class Client:
    """Calls the model without a pause, over the servers that are ready, as a load balancer does."""

    def __init__(self, operation: "Operation") -> None:
        self._operation = operation
        self._ended = threading.Event()
        self.prices: list[tuple[str, float]] = []
        self.failures: list[str] = []
        self._thread = threading.Thread(target=self._call)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        self._ended.set()
        if self._thread.is_alive():
            self._thread.join()

    def _call(self) -> None:
        while not self._ended.wait(0.02):
            port = next((port for port in ("8443", "8444") if self._is_ready(port)), "none")
            try:
                response = self._operation.infer(port, "app-2")
                self.prices.append((port, response.json()["outputs"][0]["data"][0]))
            except Exception as error:
                self.failures.append(f"{port}: {error!r}")

    def _is_ready(self, port: str) -> bool:
        try:
            return self._operation.get(port, "/v2/health/ready").status_code == 200
        except requests.RequestException:
            return False


class Operation:
    """The state of the page: the shell, and what is checked after each section, by its heading."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.shell = Shell(folder)
        self.ports = dict(zip(PORTS, map(str, free_ports(len(PORTS))), strict=True))
        self.receiver = OtlpReceiver()
        self.ports["4318"] = self.receiver.url.rpartition(":")[2]
        self.client = Client(self)
        self.output = ""
        self.blocks: dict[str, list[str]] = {}
        self.checks: dict[str, Callable[[], None]] = {
            "Create a model": self.check_model,
            "Start the server": self.check_first_response,
            "Create API keys": self.check_keys,
            "Start the server with keys and TLS": self.check_access,
            "Replace the certificate": self.check_certificate,
            "Revoke a key": self.check_revoked_key,
            "Scrape metrics": self.check_metrics,
            "Read the access log": self.check_access_log,
            "Follow traces": self.check_traces,
            "A new version of a model": lambda: self.check_price(96000.0),
            "Roll a model back": lambda: self.check_price(80000.0),
            "A new version of Dragoman": self.check_upgrade,
            "Stop": self.check_end,
        }

    def run(self, heading: str, blocks: dict[str, list[str]]) -> None:
        self.blocks = blocks
        if heading == "A new version of a model":
            self.client.start()
        commands = "\n".join(blocks.get("bash", ()))
        self.output = self.shell.run(re.sub(rf"\b({'|'.join(self.ports)})\b", lambda m: self.ports[m[0]], commands))
        if heading in self.checks:
            self.checks.pop(heading)()

    def close(self) -> None:
        self.client.stop()
        self.shell.close()
        self.receiver.close()

    def key(self, name: str) -> str:
        return (self.folder / f"{name}.key").read_text().strip()

    def get(self, port: str, path: str, key: str = "") -> requests.Response:
        headers = {"authorization": f"Bearer {self.key(key)}"} if key else {}
        url = f"https://127.0.0.1:{self.ports[port]}{path}"
        return requests.get(url, headers=headers, verify=str(self.folder / "server.pem"), timeout=TIMEOUT_S)

    def infer(self, port: str, key: str) -> requests.Response:
        headers = {"authorization": f"Bearer {self.key(key)}"} if key else {}
        url = f"https://127.0.0.1:{self.ports[port]}/v2/models/price/infer"
        return requests.post(url, json=BODY, headers=headers, verify=str(self.folder / "server.pem"), timeout=TIMEOUT_S)

    def certificate(self) -> str:
        return ssl.get_server_certificate(("127.0.0.1", int(self.ports["8443"])))

    # --- deploy ---------------------------------------------------------------------------------------------

    def check_model(self) -> None:
        assert "everything works" in self.output

    def check_first_response(self) -> None:
        assert '"data":[80000.0]' in self.output

    # --- secure ---------------------------------------------------------------------------------------------

    def check_keys(self) -> None:
        stored = (self.folder / "keys.toml").read_text()
        for name in ("app", "prometheus", "operator"):
            assert len(self.key(name)) > 40
            assert self.key(name) not in stored
            assert (self.folder / f"{name}.key").stat().st_mode & 0o077 == 0

    def check_access(self) -> None:
        assert '"data":[80000.0]' in self.output
        assert self.infer("8443", "").status_code == 401
        assert self.infer("8443", "prometheus").status_code == 403
        assert self.infer("8443", "app").status_code == 200
        assert self.get("8443", "/metrics", "operator").status_code == 404
        with pytest.raises(requests.ConnectionError):
            requests.get(f"http://127.0.0.1:{self.ports['8443']}/v2", timeout=TIMEOUT_S)
        self.first_certificate = self.certificate()

    def check_certificate(self) -> None:
        wait_until(lambda: self.certificate() != self.first_certificate, "the new certificate")
        assert self.infer("8443", "app").status_code == 200

    def check_revoked_key(self) -> None:
        wait_until(lambda: self.infer("8443", "app").status_code == 401, "the end of the key")
        assert self.infer("8443", "app-2").status_code == 200

    # --- observe --------------------------------------------------------------------------------------------

    def check_metrics(self) -> None:
        (text,) = self.blocks["yaml"]
        (job,) = yaml.safe_load(text)["scrape_configs"]
        (target,) = job["static_configs"][0]["targets"]
        key = (self.folder / job["authorization"]["credentials_file"]).read_text().strip()
        host, _, port = target.partition(":")
        response = requests.get(
            f"{job['scheme']}://{host}:{self.ports[port]}/metrics",
            headers={"authorization": f"Bearer {key}"},
            verify=str(self.folder / job["tls_config"]["ca_file"]),
            timeout=TIMEOUT_S,
        )
        assert response.status_code == 200
        samples = [s for f in text_string_to_metric_families(response.text) for s in f.samples]
        values: Counter[tuple[str, str | None, str | None]] = Counter()
        for s in samples:
            values[s.name, s.labels.get("reason"), s.labels.get("status")] += s.value
        assert values["dragoman_access_denied_total", "missing", None] == 1
        assert values["dragoman_access_denied_total", "invalid", None] >= 1
        assert values["dragoman_requests_total", None, "403"] == 1
        written = {
            s.name for f in text_string_to_metric_families((self.folder / "metrics.txt").read_text()) for s in f.samples
        }
        assert {s.name for s in samples} >= written > {"dragoman_calls_total"}

    def check_access_log(self) -> None:
        assert 'request_id="order-17"' in self.output
        assert 'model="price"' in self.output
        assert "status=200" in self.output

    def check_traces(self) -> None:
        request, *parts = self.receiver.trace("4bf92f3577b34da6a3ce929d0e0e4736", 2)
        assert (request.parent_id, request.kind, request.is_error) == ("00f067aa0ba902b7", SERVER, False)
        assert {part.parent_id for part in parts} <= {request.span_id, *(part.span_id for part in parts)}

    # --- upgrade --------------------------------------------------------------------------------------------

    def check_price(self, expected: float) -> None:
        wait_until(lambda: self.client.failures or self.client.prices[-1:] == [("8443", expected)], f"price {expected}")
        assert self.client.failures == []

    def check_upgrade(self) -> None:
        wait_until(lambda: self.client.failures or self.client.prices[-1:] == [("8444", 80000.0)], "the other server")
        time.sleep(0.2)
        self.client.stop()
        assert self.client.failures == []
        assert len(self.client.prices) > 50
        assert {price for _, price in self.client.prices} == {80000.0, 96000.0}

    def check_end(self) -> None:
        assert self.shell.run("jobs -r").strip() == ""
        log = (self.folder / "server.log").read_text() + (self.folder / "server-2.log").read_text()
        assert "Traceback" not in log
        for name in ("app", "app-2", "prometheus", "operator"):
            assert self.key(name) not in log


def test_an_operator_follows_the_page(tmp_path: Path) -> None:
    operation = Operation(tmp_path)
    try:
        for heading, blocks in sections(PAGE.read_text()):
            operation.run(heading, blocks)
        assert operation.checks == {}, "each check belongs to a heading of the page"
    finally:
        operation.close()
