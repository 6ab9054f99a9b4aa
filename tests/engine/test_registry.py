"""The registry of deployments: versions and defaults."""

import pytest

from dragoman.core.errors import ModelNotFound
from dragoman.core.spec import ModelSpec
from dragoman.engine.deployment import Deployment
from dragoman.engine.registry import ModelRegistry
from dragoman.engine.version_routing import VersionRouting


def deployments(*versions: str) -> dict[str, Deployment]:
    return {v: Deployment(ModelSpec(name="m", version=v), lambda: None) for v in versions}


@pytest.mark.parametrize(
    ("versions", "default", "expected"),
    [
        (["1", "2", "10"], "", "10"),
        (["1", "2", "10"], "2", "2"),
        (["1", "10"], "2", "10"),
        (["v1", "v2"], "", "v2"),
        (["v9", "3"], "", "3"),
        (["", "7"], "", ""),
        ([""], "", ""),
    ],
)
async def test_default_version(versions: list[str], default: str, expected: str) -> None:
    registry = ModelRegistry()
    registry.put("m", deployments(*versions), VersionRouting(default))
    assert registry.find("m").spec.version == expected
    assert all(registry.find("m", v).spec.version == v for v in versions if v)


async def test_unknown_models_and_versions_raise() -> None:
    registry = ModelRegistry()
    registry.put("m", deployments("1", "2"))
    with pytest.raises(ModelNotFound, match="Request for unknown model: 'nope' is not found"):
        registry.find("nope")
    with pytest.raises(ModelNotFound, match=r"'m' version 3 is not found; there are 1, 2"):
        registry.find("m", "3")
    assert registry.versions("m") == ["1", "2"]
    assert [d.spec.version for d in registry.remove("m")] == ["1", "2"]
    with pytest.raises(ModelNotFound):
        registry.remove("m")


async def test_the_newest_ready_version_is_the_default() -> None:
    versions = deployments("1", "2", "3")
    versions["1"].state = versions["2"].state = "READY"
    versions["3"].state = "UNAVAILABLE"
    registry = ModelRegistry()
    registry.put("m", versions)
    assert registry.find("m").spec.version == "2"
    assert registry.find("m", "3").spec.version == "3"


async def test_versions_can_be_removed_individually() -> None:
    registry = ModelRegistry()
    registry.put("m", deployments("1", "2"))
    with pytest.raises(ModelNotFound, match="version 7 is not found"):
        registry.remove("m", "7")
    assert [d.spec.version for d in registry.remove("m", "2")] == ["2"]
    assert registry.versions("m") == ["1"]
    assert [d.spec.version for d in registry.remove("m", "1")] == ["1"]
    assert registry.names() == []


async def test_all_models_are_sorted_by_name_and_follow_each_change() -> None:
    registry = ModelRegistry()
    first, second = deployments("10", "9"), deployments("")
    registry.put("b", first)
    assert registry.all() == [first["9"], first["10"]]
    registry.put("a", second)
    registry.all().clear()  # a copy
    assert registry.all() == [second[""], first["9"], first["10"]]
    registry.remove("b", "9")
    assert registry.all() == [second[""], first["10"]]
