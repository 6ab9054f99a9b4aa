"""The files in `deploy/`, as values."""

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml

from .go_template import render_chart

ROOT = Path(__file__).parents[2]
DEPLOY = ROOT / "deploy"
CHART = DEPLOY / "helm" / "dragoman"


def load(path: str) -> list[Any]:
    """Return the documents of a YAML file in `deploy/`."""
    return [each for each in yaml.safe_load_all((DEPLOY / path).read_text()) if each is not None]


def chart(**changes: Any) -> list[dict[str, Any]]:
    """Return the objects of the Helm chart, with some of its values replaced."""
    return render_chart(CHART, chart_values(changes))


def chart_values(changes: dict[str, Any]) -> dict[str, Any]:
    """Return the values of the chart with changes, which are merged into its objects as Helm does."""
    values: dict[str, Any] = _merged(yaml.safe_load((CHART / "values.yaml").read_text()), changes)
    return values


def _merged(values: Any, changes: Any) -> Any:
    if not (isinstance(values, dict) and isinstance(changes, dict)):
        return changes
    return {**values, **{name: _merged(values.get(name), change) for name, change in changes.items()}}


def page_values() -> dict[str, dict[str, Any]]:
    """Return the values of the chart that docs/kubernetes.md shows, by the name of the file in the first line."""
    page = (ROOT / "docs" / "kubernetes.md").read_text()
    return {
        name: yaml.safe_load(text)
        for name, text in re.findall(r"`([\w-]+\.yaml)`:\n\n```yaml\n(.*?)```", page, re.DOTALL)
    }


def kubernetes() -> list[dict[str, Any]]:
    """Return the objects of `deploy/kubernetes`."""
    names = load("kubernetes/kustomization.yaml")[0]["resources"]
    return [each for name in names for each in load(f"kubernetes/{name}")]


def pods() -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield every pod with a Dragoman container: its name for messages, and its spec."""
    for name, objects in (("kubernetes", kubernetes()), ("helm", chart())):
        (deployment,) = (each for each in objects if each["kind"] == "Deployment")
        yield name, deployment["spec"]["template"]["spec"]
    for name in ("runtime-dragoman", "runtime-mlserver"):
        (runtime,) = load(f"kserve/{name}.yaml")
        yield name, runtime["spec"]


def environment(container: dict[str, Any]) -> dict[str, str]:
    """Return the environment variables of a container that have a value of their own."""
    return {each["name"]: each["value"] for each in container.get("env", ()) if "value" in each}


def render_with_helm(values: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the objects of the Helm chart, rendered by Helm without remarks of its linter."""
    from helm_python.chart import Chart, lint

    assert not lint(str(CHART), values, strict=True)["errors"]
    rendered = Chart.load(str(CHART)).render(values, name="test", namespace="default")
    texts = [rendered[name] for name in sorted(rendered) if name.endswith(".yaml")]
    return [each for text in texts for each in yaml.safe_load_all(text) if each is not None]
