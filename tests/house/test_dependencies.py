"""A default server needs the dependencies of pyproject.toml and no other package."""

import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
DEPENDENCIES = {"numpy", "ml_dtypes", "msgspec", "orjson", "httptools", "uvloop", "protobuf", "hpack", "wsproto"}
# Serves a model over REST and gRPC while no other package can be imported.
SCRIPT = """
import importlib.metadata, sys
MODULES = {dependencies!r} - {{"protobuf"}} | {{"google", "dragoman", "__main__"}}

class BlockOtherPackages:
    def find_spec(self, name, path=None, target=None):
        top = name.partition(".")[0]
        if top not in MODULES and top not in sys.stdlib_module_names and not top.startswith("_"):
            raise ModuleNotFoundError(f"No module named {{name!r}}", name=name)

sys.meta_path.insert(0, BlockOtherPackages())
import asyncio, json, socket, urllib.request
import dragoman, uvloop

class Twice(dragoman.Model):
    inputs = (dragoman.TensorSpec("x", dragoman.FP32, (-1,)),)
    def infer(self, call):
        return {{"y": call.inputs["x"].data * 2}}

def infer(url):
    body = json.dumps({{"inputs": [{{"name": "x", "shape": [1], "datatype": "FP32", "data": [1.5]}}]}}).encode()
    with urllib.request.urlopen(url + "/v2/models/Twice/infer", body) as response:
        return json.load(response)["outputs"][0]["data"]

async def main():
    async with dragoman.Server(Twice, placement="thread", http_port=0, grpc_port=0) as server:
        print(await asyncio.to_thread(infer, server.http_url), "google" in sys.modules)
        client = dragoman.Client(f"grpc://127.0.0.1:{{server.grpc_port}}")
        print(await asyncio.to_thread(client.ready, "Twice"))

uvloop.run(main())
print(*sorted({{m.partition(".")[0] for m in sys.modules}} & MODULES))
"""


def test_the_declared_dependencies_match() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert {re.split(r"[>=<;]", name)[0] for name in project["dependencies"]} == DEPENDENCIES


# orjson has no wheels for some Pythons: see dragoman/formats/fast_json.py.
@pytest.mark.parametrize("dependencies", [DEPENDENCIES, DEPENDENCIES - {"orjson"}], ids=["all", "without orjson"])
def test_a_default_server_imports_only_its_dependencies(dependencies: set[str]) -> None:
    code = SCRIPT.format(dependencies=dependencies)
    process = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert process.returncode == 0, process.stderr
    served, ready, imported = process.stdout.splitlines()
    assert served == "[3.0] False"  # protobuf is imported for calls over gRPC
    assert ready == "True"
    later = {"protobuf", "wsproto"}  # wsproto is imported for the first WebSocket
    assert set(imported.split()) == dependencies - later | {"google", "dragoman", "__main__"}
