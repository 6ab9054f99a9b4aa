"""Which code is mutated, and which tests are to notice it."""

from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
SOURCE = ROOT / "src"


@dataclass(frozen=True)
class Target:
    """Files below `src` and the test files that cover them, none of which takes long."""

    name: str
    files: tuple[str, ...]
    tests: tuple[str, ...]

    def paths(self) -> list[Path]:
        found = [path for pattern in self.files for path in sorted(SOURCE.glob(pattern))]
        assert found, f"no file of target {self.name!r} matches"
        return [path for path in found if path.name != "__init__.py" or path.stat().st_size > 200]


_GRAPH_TESTS = (
    "scheduling",
    "building",
    "builtin",
    "derivatives",
    "details",
    "documents",
    "drawing",
    "files",
    "known_answers",
    "siblings",
)
_DERIVATIVE_TESTS = (
    "check_derivatives",
    "derivative_configs",
    "derivative_details",
    "derivative_edges",
    "derivative_properties",
    "dual_numbers",
    "torch_module",
    "vector_functions",
    "verification",
    "verification_steps",
)

TARGETS = (
    Target(
        "batching",
        ("dragoman/engine/batching.py", "dragoman/engine/batch_delay.py", "dragoman/engine/call_handler.py"),
        ("tests/engine/test_batching.py", "tests/engine/test_batch_delay.py", "tests/engine/test_engine.py"),
    ),
    Target(
        "core",
        ("dragoman/core/*.py",),
        (
            "tests/core",
            "tests/codecs/test_type_aliases.py",
            "tests/engine",
            "tests/features/simulators/graphs/test_daemon_threads.py",
            "tests/workers/test_workers_frames.py",
            "tests/workers/test_workers_shared_buffers.py",
        ),
    ),
    Target(
        "graphs",
        ("dragoman_simulators/graphs/*.py",),
        tuple(f"tests/features/simulators/graphs/test_graph_{part}.py" for part in _GRAPH_TESTS),
    ),
    Target(
        "formats",
        ("dragoman/formats/*.py",),
        (
            "tests/formats",
            "tests/codecs/test_spec_examples.py",
            "tests/rest/test_rest_binary.py",
            "tests/rest/test_rest_garbage.py",
            "tests/rest/test_rest_messages.py",
            "tests/grpc/test_grpc_messages.py",
            "tests/grpc/test_grpc_reply.py",
            "tests/grpc/test_grpc_infer.py",
            "tests/features/simulators/test_umbridge_json.py",
            "tests/features/simulators/test_umbridge_messages.py",
            "tests/features/simulators/test_umbridge_wire.py",
        ),
    ),
    Target(
        "derivatives",
        ("dragoman_simulators/derivatives/*.py",),
        tuple(f"tests/features/simulators/derivatives/test_{part}.py" for part in _DERIVATIVE_TESTS),
    ),
)
