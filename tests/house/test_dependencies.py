"""A default server needs the dependencies of pyproject.toml and no other package."""

import re
import subprocess
import sys
import tomllib
from pathlib import Path

ROOT = Path(__file__).parents[2]
DEPENDENCIES = {"numpy", "ml_dtypes", "msgspec", "orjson", "httptools", "uvloop", "protobuf", "hpack"}
# Serves a model over REST and over gRPC's health service while every other package cannot be imported.
SCRIPT = """
import importlib.metadata, sys
MODULES = {dependencies!r} - {{"protobuf"}} | {{"google", "dragoman", "__main__"}}

class Others:
    def find_spec(self, name, path=None, target=None):
        top = name.partition(".")[0]
        if top not in MODULES and top not in sys.stdlib_module_names and not top.startswith("_"):
            raise ModuleNotFoundError(f"No module named {{name!r}}", name=name)

sys.meta_path.insert(0, Others())
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
        print(await asyncio.to_thread(infer, server.http_url), server.grpc_port > 0)

uvloop.run(main())
print(*sorted({{m.partition(".")[0] for m in sys.modules}} & MODULES))
"""


def test_the_dependencies_are_those_that_a_server_imports() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert {re.split(r"[>=<;]", name)[0] for name in project["dependencies"]} == DEPENDENCIES


def test_a_default_server_runs_with_its_dependencies_alone() -> None:
    code = SCRIPT.format(dependencies=DEPENDENCIES)
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    served, imported = done.stdout.splitlines()
    assert served == "[3.0] True"
    assert set(imported.split()) == DEPENDENCIES - {"protobuf"} | {"google", "dragoman", "__main__"}
