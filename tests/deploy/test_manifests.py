"""The manifests are valid by the schemas of Kubernetes and KServe, and keep the server's rules.

This is all that can be checked without a cluster: no admission webhook, no CEL rule, no container engine.
"""

import argparse
import configparser
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from dragoman import __version__
from dragoman.cli.serve import add_arguments
from dragoman.settings import from_environment, parse_settings
from dragoman_cluster.worker_command import add_arguments as add_worker_arguments

from .manifests import CHART, DEPLOY, ROOT, chart, environment, kubernetes, load, pods
from .resource_schemas import check_resource

PODS = dict(pods())
KSERVE_GRACE_S = 30  # the default of Kubernetes: a ServingRuntime does not set it


def container(name: str) -> dict[str, Any]:
    (found,) = PODS[name]["containers"]
    assert isinstance(found, dict)
    return found


def settings_of(name: str) -> argparse.Namespace:
    """Return the settings of a container: its variables, and its flags as `dragoman serve` parses them."""
    parser = argparse.ArgumentParser(exit_on_error=False, add_help=False)
    add_arguments(parser)
    flags = vars(parser.parse_args(container(name)["args"]))
    given = {key: value for key, value in flags.items() if value is not None}
    paths, is_check = given.pop("paths"), given.pop("check")
    assert not is_check
    settings = parse_settings(from_environment(environment(container(name))), given)
    return argparse.Namespace(paths=paths, settings=settings)


# --- schemas -------------------------------------------------------------------------------------------------


def test_kubernetes_manifests_are_valid() -> None:
    workers = [
        each for name in ("workers", "service", "networkpolicy") for each in load(f"kubernetes-workers/{name}.yaml")
    ]
    scaling = [
        each
        for name in ("hpa", "scaledobject", "servicemonitor")
        for each in load(f"kubernetes-autoscaling/{name}.yaml")
    ]
    for each in (*kubernetes(), *workers, *scaling):
        check_resource(each)


def test_misspelled_fields_are_found() -> None:
    import jsonschema
    import kubernetes_validate

    (deployment,) = (each for each in kubernetes() if each["kind"] == "Deployment")
    deployment["spec"]["template"]["spec"]["containers"][0]["resourcez"] = {}
    with pytest.raises(kubernetes_validate.ValidationError):
        check_resource(deployment)
    (runtime,) = load("kserve/runtime-dragoman.yaml")
    runtime["spec"]["supportedModelFormats"][0]["autoselect"] = True
    with pytest.raises(jsonschema.ValidationError, match="autoselect"):
        check_resource(runtime)


@pytest.mark.parametrize("file", sorted((DEPLOY / "kserve").glob("*.yaml")), ids=lambda p: p.stem)
def test_kserve_manifests_are_valid(file: Path) -> None:
    for each in load(f"kserve/{file.name}"):
        check_resource(each)


# --- rules of the server -------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", PODS)
def test_arguments_and_variables_are_settings(name: str) -> None:
    settings = settings_of(name).settings
    assert settings.host == "0.0.0.0" or name in ("kubernetes", "helm")  # there by the image's DRAGOMAN_HOST
    assert settings.drain_delay_s >= 2 * container(name)["readinessProbe"]["periodSeconds"]
    grace_s = PODS[name].get("terminationGracePeriodSeconds", KSERVE_GRACE_S)
    assert settings.drain_delay_s + settings.drain_s + 5 <= grace_s


@pytest.mark.parametrize("name", PODS)
def test_probes_ask_for_readiness(name: str) -> None:
    found = container(name)
    ready, live = "/v2/health/ready", "/v2/health/live"
    paths = {probe: found[f"{probe}Probe"]["httpGet"]["path"] for probe in ("startup", "readiness", "liveness")}
    assert paths == {"startup": ready, "readiness": ready, "liveness": live}
    assert found["startupProbe"]["periodSeconds"] * found["startupProbe"]["failureThreshold"] >= 600


@pytest.mark.parametrize("name", PODS)
def test_containers_have_no_privileges_and_write_only_to_tmp(name: str) -> None:
    found, pod = container(name), PODS[name]
    security = found["securityContext"]
    assert (security["allowPrivilegeEscalation"], security["readOnlyRootFilesystem"]) == (False, True)
    assert security["capabilities"] == {"drop": ["ALL"]}
    assert (pod.get("securityContext") or security)["runAsNonRoot"] is True
    writable = {each["mountPath"] for each in found["volumeMounts"] if not each.get("readOnly")}
    assert writable == {"/tmp"}
    assert {each["name"] for each in found["volumeMounts"]} == {each["name"] for each in pod["volumes"]}


def test_the_service_and_policies_select_the_pods() -> None:
    for objects in (kubernetes(), chart()):
        named = {each["kind"]: each["spec"] for each in objects}
        labels = named["Deployment"]["template"]["metadata"]["labels"].items()
        assert named["Service"]["selector"].items() <= labels
        assert named["Deployment"]["selector"]["matchLabels"].items() <= labels
        assert named["PodDisruptionBudget"]["selector"]["matchLabels"].items() <= labels
        assert named["NetworkPolicy"]["podSelector"]["matchLabels"].items() <= labels
        ports = {each["name"] for each in named["Deployment"]["template"]["spec"]["containers"][0]["ports"]}
        assert {each["targetPort"] for each in named["Service"]["ports"]} == ports
        allowed = named["NetworkPolicy"]["ingress"][0]["ports"]
        assert {each["port"] for each in allowed} == ports


def test_workers_join_the_server() -> None:
    """Ports, secrets, files and policies of the two sides fit, and their arguments are those of the commands."""
    named = {(each["kind"], each["metadata"]["name"]): each["spec"] for name in ("workers", "service", "networkpolicy")
             for each in load(f"kubernetes-workers/{name}.yaml")}  # fmt: skip
    (patch,) = load("kubernetes-workers/server.yaml")
    (base,) = (each for each in kubernetes() if each["kind"] == "Deployment")
    assert patch["spec"]["strategy"] == {"type": "Recreate", "rollingUpdate": None}  # null removes that of the base
    server = patch["spec"]["template"]["spec"]["containers"][0]
    pod = named["Deployment", "dragoman-worker"]["template"]
    (worker,) = pod["spec"]["containers"]
    parser = argparse.ArgumentParser(exit_on_error=False)
    add_worker_arguments(parser)
    assert worker["command"] == ["dragoman", "worker"]
    arguments = parser.parse_args(worker["args"])
    parser = argparse.ArgumentParser(exit_on_error=False, add_help=False)
    add_arguments(parser)
    settings = parser.parse_args(server["args"])
    assert set(base["spec"]["template"]["spec"]["containers"][0]["args"]) < set(server["args"])

    port = {each["containerPort"]: each["name"] for each in server["ports"]}[int(settings.worker_port)]
    service = named["Service", "dragoman-workers"]
    assert [each["targetPort"] for each in service["ports"]] == [port]
    assert arguments.join == [f"dragoman-workers:{service['ports'][0]['port']}"]
    assert service["selector"].items() <= base["spec"]["template"]["metadata"]["labels"].items()
    assert named["Deployment", "dragoman-worker"]["selector"]["matchLabels"] == pod["metadata"]["labels"]
    outwards, inwards = (named["NetworkPolicy", name] for name in ("dragoman-worker", "dragoman-workers"))
    assert outwards["podSelector"]["matchLabels"] == pod["metadata"]["labels"]
    assert inwards["ingress"][0]["from"][0]["podSelector"]["matchLabels"] == pod["metadata"]["labels"]
    assert inwards["podSelector"]["matchLabels"] == outwards["egress"][0]["to"][0]["podSelector"]["matchLabels"]
    assert inwards["ingress"][0]["ports"] == outwards["egress"][0]["ports"] == [{"port": int(settings.worker_port)}]

    assert settings.worker_secret_file == arguments.secret_file
    for volumes, mounts in (
        (patch["spec"]["template"]["spec"]["volumes"], server["volumeMounts"]),
        (pod["spec"]["volumes"], worker["volumeMounts"]),
    ):
        assert {each["name"] for each in volumes} == {each["name"] for each in mounts}
        assert {"name": "secret", "mountPath": "/secret", "readOnly": True} in mounts
        assert {"name": "secret", "secret": {"secretName": "dragoman-workers", "defaultMode": 0o440}} in volumes
    models = {"name": "models", "mountPath": "/models", "readOnly": True}
    assert models in worker["volumeMounts"]
    assert models in base["spec"]["template"]["spec"]["containers"][0]["volumeMounts"]
    assert worker["securityContext"] == base["spec"]["template"]["spec"]["containers"][0]["securityContext"]
    assert pod["spec"]["securityContext"] == base["spec"]["template"]["spec"]["securityContext"]
    (kustomization,) = load("kubernetes-workers/kustomization.yaml")
    assert kustomization["images"][0]["newTag"] == __version__
    files = {file.name for file in (DEPLOY / "kubernetes-workers").glob("*")} - {"kustomization.yaml"}
    assert {*kustomization["resources"], kustomization["patches"][0]["path"]} == {*files, "../kubernetes"}


def test_kserve_conventions() -> None:
    mlserver, own = (load(f"kserve/{name}.yaml")[0] for name in ("runtime-mlserver", "runtime-dragoman"))
    assert mlserver["metadata"]["annotations"] == {"serving.kserve.io/server-type": "mlserver"}
    assert own["spec"]["protocolVersions"] == ["v1", "v2", "grpc-v2"]
    formats = {each["name"] for each in own["spec"]["supportedModelFormats"]}
    assert formats == {"onnx", "sklearn", "xgboost", "lightgbm", "pytorch", "mlflow", "huggingface"}
    for runtime in (mlserver, own):
        (found,) = runtime["spec"]["containers"]
        assert found["name"] == "kserve-container"
        assert runtime["spec"]["annotations"]["prometheus.kserve.io/port"] == "8080"
        known = {(each["name"], each["version"]) for each in runtime["spec"]["supportedModelFormats"]}
        assert len(known) == len(runtime["spec"]["supportedModelFormats"])
    served = {(each["name"], each["version"]) for each in own["spec"]["supportedModelFormats"]} | {
        (each["name"], each["version"]) for each in mlserver["spec"]["supportedModelFormats"]
    }
    runtimes = {each["metadata"]["name"]: each["spec"] for each in (mlserver, own)}
    for service in load("kserve/inferenceservices.yaml"):
        model = service["spec"]["predictor"]["model"]
        assert (model["modelFormat"]["name"], model["modelFormat"]["version"]) in served
        assert model.get("protocolVersion", "v2") in runtimes[model["runtime"]]["protocolVersions"]
    assert settings_of("runtime-dragoman").settings.model_name == "{{.Name}}"
    assert settings_of("runtime-dragoman").settings.grpc_port == 9000


def test_versions_are_those_of_the_package() -> None:
    tags = {name: found["containers"][0]["image"].partition(":")[2] for name, found in PODS.items()}
    assert {tags["runtime-dragoman"], tags["runtime-mlserver"], tags["helm"]} == {__version__}
    described = yaml.safe_load((CHART / "Chart.yaml").read_text())
    assert (described["version"], described["appVersion"]) == (__version__, __version__)
    assert load("kubernetes/kustomization.yaml")[0]["images"][0]["newTag"] == __version__
    assert load("compose/compose.yaml")[0]["services"]["dragoman"]["image"] == f"dragoman:{__version__}"


# --- compose and systemd -------------------------------------------------------------------------------------


def test_compose() -> None:
    (compose,) = load("compose/compose.yaml")
    services = compose["services"]
    assert set(services) == {"dragoman", "prometheus", "grafana", "collector"}
    folder = DEPLOY / "compose"
    for name, service in services.items():
        assert service["cap_drop"] == ["ALL"]
        if name != "dragoman":
            assert re.fullmatch(r"docker\.io/[\w/.-]+:v?[\d.]+@sha256:[0-9a-f]{64}", service["image"])
        assert all(port.startswith("127.0.0.1:") for port in service.get("ports", ()))
        for volume in service["volumes"]:
            source = volume.partition(":")[0]
            if source.startswith("."):
                assert (folder / source).exists(), source
            elif not source.startswith("$"):
                assert source in compose["volumes"]
    build = services["dragoman"]["build"]
    assert (folder / build["context"] / build["dockerfile"]).resolve() == ROOT / "Containerfile"
    assert services["dragoman"]["read_only"] is True
    (prometheus,) = load("compose/prometheus.yaml")
    targets = [each for job in prometheus["scrape_configs"] for each in job["static_configs"][0]["targets"]]
    assert [target.partition(":")[0] for target in targets] == ["dragoman", "collector"]
    (collector,) = load("compose/collector.yaml")
    for pipeline in collector["service"]["pipelines"].values():
        for kind in ("receivers", "processors", "exporters"):
            assert set(pipeline[kind]) <= set(collector[kind])
    assert services["dragoman"]["environment"]["OTEL_EXPORTER_OTLP_ENDPOINT"].endswith(":4318")


def test_systemd_unit(tmp_path: Path) -> None:
    text = (DEPLOY / "systemd" / "dragoman.service").read_text()
    page = (ROOT / "docs" / "systemd.md").read_text()
    (drop_in,) = re.findall(r"```ini\n(.*?)```", page, re.DOTALL)
    sources = dict(re.findall(r"^LoadCredential=([^:]+):(.+)$", drop_in, re.MULTILINE))
    variables = dict(re.findall(r"(DRAGOMAN_\w+)=%d/(\S+)", drop_in))
    assert set(variables.values()) == set(sources)
    from_environment(variables)
    parser = configparser.ConfigParser(strict=False, interpolation=None)
    parser.optionxform = str  # type: ignore[assignment,method-assign]
    parser.read_string(text)
    service = parser["Service"]
    assert service["KillMode"] == "mixed"
    assert (service["Type"], service["TimeoutStartSec"]) == ("notify", "infinity")  # models may load for long
    assert int(service["TimeoutStopSec"]) > parse_settings().drain_s + parse_settings().drain_delay_s
    assert service["ExecStart"].split()[1] == "serve"
    assert service["ExecReload"] == "kill -HUP $MAINPID"  # docs/deploy.md: `systemctl reload`
    if analyze := shutil.which("systemd-analyze"):
        unit = tmp_path / "dragoman.service"
        unit.write_text(text.replace("/opt/dragoman/bin/dragoman", "/bin/true"))
        (tmp_path / "dragoman.service.d").mkdir()
        (tmp_path / "dragoman.service.d" / "override.conf").write_text(drop_in)
        sockets = [tmp_path / file.name for file in (DEPLOY / "systemd").glob("*.socket")]
        for each in sockets:
            each.write_text((DEPLOY / "systemd" / each.name).read_text())
        done = subprocess.run([analyze, "verify", unit, *sockets], capture_output=True, text=True)
        assert (done.returncode, done.stderr) == (0, "")


def test_socket_units_are_those_of_the_service() -> None:
    names, addresses = set(), set()
    for file in (DEPLOY / "systemd").glob("*.socket"):
        parser = configparser.ConfigParser(interpolation=None)
        parser.optionxform = str  # type: ignore[assignment,method-assign]
        parser.read_string(file.read_text())
        assert parser["Socket"].get("Service", f"{file.stem}.service") == "dragoman.service"
        names.add(parser["Socket"]["FileDescriptorName"])
        addresses.add(parser["Socket"]["ListenStream"])
    settings = parse_settings()
    assert names == {"http", "grpc"}
    assert addresses == {f"{settings.host}:{settings.http_port}", f"{settings.host}:{settings.grpc_port}"}
