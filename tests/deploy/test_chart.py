"""The Helm chart: each task of an operator renders valid objects that fit together; contradicting values are rejected.

`test_contract.py` starts a server as the chart does, with keys, TLS and an admin port.
"""

import json
import shutil
import subprocess
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import yaml

from dragoman import __version__

from .go_template import ChartError
from .manifests import CHART, DEPLOY, chart, chart_values, load, page_values, render_with_helm
from .resource_schemas import check_resource

RULES = DEPLOY / "monitoring" / "rules.yaml"
PAGE = page_values()
VALUES: dict[str, dict[str, Any]] = {
    "default": {},
    "digest": {"image": {"repository": "registry/models", "tag": "1", "digest": "sha256:" + "a" * 64}},
    "tag": {"image": {"repository": "registry/models", "pullPolicy": "Always"}},
    "pod": {"podLabels": {"team": "ml"}, "podAnnotations": {"note": "1"}, "imagePullSecrets": [{"name": "registry"}]},
    "settings": {
        "environment": [{"name": "DRAGOMAN_TIMEOUT_S", "value": "5"}],
        "environmentFrom": [{"secretRef": {"name": "settings"}}, {"configMapRef": {"name": "more"}}],
        "arguments": [],
        "httpPort": 9000,
    },
    "volume": {"models": {"claimName": "", "volume": {"nfs": {"server": "files", "path": "/models"}}}},
    "nodes": {
        "nodeSelector": {"gpu": "yes"},
        "tolerations": [{"key": "gpu", "operator": "Exists"}],
        "affinity": {"podAntiAffinity": {}},
        "priorityClassName": "serving",
        "topologySpreadConstraints": [
            {"maxSkew": 1, "topologyKey": "zone", "whenUnsatisfiable": "DoNotSchedule"},
            {"maxSkew": 2, "topologyKey": "host", "whenUnsatisfiable": "ScheduleAnyway", "minDomains": 2},
        ],
    },
    "extra volumes": {
        "extraVolumes": [{"name": "ca", "secret": {"secretName": "ca"}}],
        "extraVolumeMounts": [{"name": "ca", "mountPath": "/ca", "readOnly": True}],
    },
    "service": {"service": {"type": "NodePort", "annotations": {"a": "b"}}},
    "without policies": {"podDisruptionBudget": {"enabled": False}, "networkPolicy": {"enabled": False}},
    "claim for the state": {"replicas": 1, "state": {"claimName": "state"}},
    "volume for the state": {"state": {"volume": {"emptyDir": {}}}},
    "named account": {"serviceAccount": {"name": "models"}},
    "hpa": {"autoscaling": {"kind": "hpa"}},
    "hpa by cores": {
        "autoscaling": {
            "kind": "hpa",
            "metrics": [
                {
                    "type": "Resource",
                    "resource": {"name": "cpu", "target": {"type": "Utilization", "averageUtilization": 70}},
                }
            ],
        }
    },
    "ingress": {
        "adminPort": 9000,
        "ingress": {
            "enabled": True,
            "className": "nginx",
            "annotations": {"a": "b"},
            "host": "models.example.com",
            "tlsSecretName": "public",
        },
    },
    **PAGE,
    "secure": PAGE["keys.yaml"] | PAGE["tls.yaml"] | PAGE["monitoring.yaml"],
}


def objects(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return the objects of the chart by their kinds."""
    return {each["kind"]: each for each in chart(**values)}


def pod_of(values: Mapping[str, Any]) -> Any:
    return objects(values)["Deployment"]["spec"]["template"]["spec"]


def check_values(values: Any) -> None:
    """Raise ValidationError if values of the chart do not match its schema."""
    import jsonschema

    jsonschema.validate(values, json.loads((CHART / "values.schema.json").read_text()))


@pytest.mark.parametrize("name", VALUES)
def test_the_chart_renders_valid_objects(name: str) -> None:
    check_values(chart_values(VALUES[name]))
    found = chart(**VALUES[name])
    for each in found:
        check_resource(each)
    pod = pod_of(VALUES[name])
    for each in (*pod.get("initContainers", ()), *pod["containers"]):
        mounted = {mount["name"] for mount in each["volumeMounts"]}
        assert mounted <= {volume["name"] for volume in pod["volumes"]}
    assert {volume["name"] for volume in pod["volumes"]} == {
        mount["name"] for mount in pod["containers"][0]["volumeMounts"]
    }


def test_the_schema_has_each_value_and_rejects_others() -> None:
    import jsonschema

    schema = json.loads((CHART / "values.schema.json").read_text())
    assert {*schema["properties"]} - {"global"} == {*chart_values({})}
    for wrong in (
        {"replica": 1},
        {"tls": {"secret": "a"}},
        {"autoscaling": {"kind": "vpa"}},
        {"adminPort": "9000"},
        {"ingress": {"enabled": True}},
        {"gateway": {"enabled": True, "hostnames": ["a"]}},
        {"topologySpreadConstraints": [{"topologyKey": "zone"}]},
    ):
        with pytest.raises(jsonschema.ValidationError):
            check_values(chart_values(wrong))


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"state": {"claimName": "state"}}, "replicas 1"),
        ({"replicas": 1, "state": {"claimName": "state"}, "autoscaling": {"kind": "hpa"}}, "no autoscaling"),
        ({"apiKeys": {"secretName": "keys"}, "serviceMonitor": {"enabled": True}}, "serviceMonitor.keySecret"),
        ({"ingress": {"enabled": True, "host": "a"}}, "adminPort"),
        ({"gateway": {"enabled": True, "hostnames": ["a"], "parentRefs": [{"name": "g"}]}}, "adminPort"),
        ({"autoscaling": {"kind": "keda"}}, "autoscaling.prometheusUrl"),
    ],
)
def test_contradictions_are_rejected(values: dict[str, Any], message: str) -> None:
    check_values(chart_values(values))
    with pytest.raises(ChartError, match=message):
        chart(**values)


# --- tasks -----------------------------------------------------------------------------------------------------


def test_images_and_settings() -> None:
    assert pod_of(VALUES["digest"])["containers"][0]["image"] == "registry/models@sha256:" + "a" * 64
    assert pod_of(VALUES["tag"])["containers"][0]["image"] == f"registry/models:{__version__}"
    (container,) = pod_of(VALUES["settings"])["containers"]
    assert container["env"] == VALUES["settings"]["environment"]
    assert container["envFrom"] == VALUES["settings"]["environmentFrom"]
    assert container["ports"][0] == {"name": "http", "containerPort": 9000}


def test_where_pods_run() -> None:
    values = VALUES["nodes"]
    template = objects(values)["Deployment"]["spec"]["template"]
    for name in ("nodeSelector", "tolerations", "affinity", "priorityClassName"):
        assert template["spec"][name] == values[name]
    spread = template["spec"]["topologySpreadConstraints"]
    assert [
        each.pop("labelSelector")["matchLabels"].items() <= template["metadata"]["labels"].items() for each in spread
    ] == [True] * 2
    assert spread == values["topologySpreadConstraints"]
    assert objects(VALUES["pod"])["Deployment"]["spec"]["template"]["metadata"]["labels"]["team"] == "ml"


def test_models_from_a_bucket() -> None:
    values = VALUES["bucket.yaml"]
    found = objects(values)
    pod = found["Deployment"]["spec"]["template"]["spec"]
    account = found["ServiceAccount"]["metadata"]
    assert (account["name"], account["annotations"]) == (
        pod["serviceAccountName"],
        values["serviceAccount"]["annotations"],
    )
    (loader,) = pod["initContainers"]
    assert {"name": "models", "emptyDir": {"sizeLimit": "20Gi"}} in pod["volumes"]
    mounts = {each["name"]: (each["mountPath"], each.get("readOnly", False)) for each in loader["volumeMounts"]}
    assert mounts["models"] == ("/models", False)
    assert "/models" in loader["args"]
    assert found["NetworkPolicy"]["spec"]["egress"] == values["networkPolicy"]["egress"]
    assert pod_of(VALUES["named account"])["serviceAccountName"] == "models"
    assert {"name": "models", "nfs": {"server": "files", "path": "/models"}} in pod_of(VALUES["volume"])["volumes"]


def test_further_volumes() -> None:
    pod = pod_of(VALUES["extra volumes"])
    assert VALUES["extra volumes"]["extraVolumes"][0] in pod["volumes"]
    assert VALUES["extra volumes"]["extraVolumeMounts"][0] in pod["containers"][0]["volumeMounts"]


def test_the_admin_port_is_not_in_the_service() -> None:
    found = objects(VALUES["tls.yaml"])
    assert {each["targetPort"] for each in found["Service"]["spec"]["ports"]} == {"http", "grpc"}
    rules = {rule["ports"][0]["port"]: rule for rule in found["NetworkPolicy"]["spec"]["ingress"]}
    assert rules["admin"]["from"] == VALUES["tls.yaml"]["networkPolicy"]["adminFrom"]
    assert len(rules["http"]["ports"]) == 2
    without = objects({"adminPort": 9000})["NetworkPolicy"]["spec"]["ingress"]
    assert [rule["ports"][0]["port"] for rule in without] == ["http"]  # `from: []` would open it to everyone


def test_the_state_belongs_to_one_server() -> None:
    deployment = objects(VALUES["claim for the state"])["Deployment"]["spec"]
    assert deployment["strategy"] == {"type": "Recreate"}
    pod = deployment["template"]["spec"]
    assert {"name": "state", "persistentVolumeClaim": {"claimName": "state"}} in pod["volumes"]
    assert "--state=/state" in pod["containers"][0]["args"]
    assert {"name": "state", "mountPath": "/state"} in pod["containers"][0]["volumeMounts"]
    assert objects(VALUES["volume for the state"])["Deployment"]["spec"]["replicas"] == 2


def test_scrapes_of_the_operator() -> None:
    found = objects(VALUES["secure"])
    monitor, pod = found["ServiceMonitor"], found["Deployment"]["spec"]["template"]["spec"]
    assert monitor["metadata"]["labels"]["release"] == "prometheus"
    assert monitor["spec"]["selector"]["matchLabels"].items() <= found["Service"]["metadata"]["labels"].items()
    assert found["Service"]["metadata"]["labels"][monitor["spec"]["jobLabel"]] == "dragoman"  # the job of the rules
    (endpoint,) = monitor["spec"]["endpoints"]
    assert endpoint["targetPort"] in {each["name"] for each in pod["containers"][0]["ports"]}
    assert (endpoint["targetPort"], endpoint["scheme"]) == ("admin", "https")
    assert endpoint["tlsConfig"]["ca"]["secret"] == {"name": "dragoman-tls", "key": "ca.crt"}
    assert endpoint["authorization"]["credentials"] == {"name": "dragoman-scraper", "key": "key"}
    assert found["PrometheusRule"]["spec"] == yaml.safe_load(RULES.read_text())
    plain = objects({"serviceMonitor": {"enabled": True}})["ServiceMonitor"]["spec"]["endpoints"]
    assert plain == [{"targetPort": "http", "path": "/metrics", "interval": "15s", "scheme": "http"}]


def test_autoscaling() -> None:
    """`test_monitoring.py` runs the queries."""
    found = objects(VALUES["autoscaling.yaml"])
    assert "replicas" not in found["Deployment"]["spec"]  # an upgrade must not set back what the autoscaler has set
    (plain,) = load("kubernetes-autoscaling/scaledobject.yaml")
    rename = json.loads(json.dumps(found["ScaledObject"]["spec"]).replace("test", "dragoman"))
    assert rename == plain["spec"]
    scaler = objects(VALUES["hpa"])["HorizontalPodAutoscaler"]
    (plain,) = load("kubernetes-autoscaling/hpa.yaml")
    target = {"apiVersion": "apps/v1", "kind": "Deployment", "name": "test"}
    assert scaler["spec"] == {**plain["spec"], "scaleTargetRef": target}
    (adapter,) = load("kubernetes-autoscaling/adapter.yaml")
    assert adapter["rules"]["custom"][0]["seriesQuery"].startswith(
        scaler["spec"]["metrics"][0]["pods"]["metric"]["name"]
    )
    by_cores = objects(VALUES["hpa by cores"])["HorizontalPodAutoscaler"]["spec"]["metrics"]
    assert by_cores == VALUES["hpa by cores"]["autoscaling"]["metrics"]


def test_routes_lead_to_the_service() -> None:
    found = objects(VALUES["gateway.yaml"])
    ports = {each["name"]: each["port"] for each in found["Service"]["spec"]["ports"]}
    name = found["Service"]["metadata"]["name"]
    for kind, port in (("HTTPRoute", "http"), ("GRPCRoute", "grpc")):
        assert found[kind]["spec"]["rules"] == [{"backendRefs": [{"name": name, "port": ports[port]}]}]
    assert not {*found["HTTPRoute"]["spec"]["hostnames"]} & {*found["GRPCRoute"]["spec"]["hostnames"]}
    ingress = objects(VALUES["ingress"])["Ingress"]["spec"]
    assert ingress["rules"][0]["http"]["paths"][0]["backend"] == {"service": {"name": name, "port": {"name": "http"}}}
    assert ingress["tls"] == [{"hosts": ["models.example.com"], "secretName": "public"}]


# --- other tools -------------------------------------------------------------------------------------------------


def _text(each: Any) -> str:
    return json.dumps(each, sort_keys=True)


def test_helm_renders_the_same() -> None:
    """Helm itself, as a library (`pip install helm-python-sdk`)."""
    pytest.importorskip("helm_python")
    for name, values in VALUES.items():
        rendered = render_with_helm(values)
        assert sorted(map(_text, rendered)) == sorted(map(_text, chart(**values))), name


@pytest.mark.skipif(shutil.which("kubectl") is None, reason="kubectl is not installed")
@pytest.mark.parametrize("folder", ["kubernetes", "kubernetes-autoscaling", "kubernetes-workers"])
def test_kubectl_builds_the_manifests(folder: str, tmp_path: Path) -> None:
    command = ["kubectl", "kustomize", str(DEPLOY / folder)]
    done = subprocess.run(command, capture_output=True, text=True, env={"HOME": str(tmp_path)}, check=False)
    assert done.returncode == 0, done.stderr
    found = list(yaml.safe_load_all(done.stdout))
    for each in found:
        check_resource(each)
    (server,) = (each for each in found if (each["kind"], each["metadata"]["name"]) == ("Deployment", "dragoman"))
    assert server["spec"].get("replicas") == {"kubernetes": 2, "kubernetes-workers": 1}.get(folder)
