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
    without: tuple[str, ...] = ()  # patterns of names

    def paths(self) -> list[Path]:
        found = [path for pattern in self.files for path in sorted(SOURCE.glob(pattern))]
        assert found, f"no file of target {self.name!r} matches"
        return [path for path in found if self._has_code(path) and not any(map(path.match, self.without))]

    @staticmethod
    def _has_code(path: Path) -> bool:
        return path.name != "__init__.py" or path.stat().st_size > 200


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

_ACCESS_TESTS = (
    "addresses",
    "admin_port",
    "api_keys",
    "audit",
    "caller_engine",
    "control",
    "grpc_keys",
    "http2_keys",
    "loopback_control",
    "process_keys",
    "reasons",
    "request_ids_of_rejections",
    "sites",
    "tokens",
)
_TEXT_API_TESTS = (
    "adapters",
    "anthropic",
    "anthropic_threads",
    "custom_tools",
    "json_values",
    "lmi",
    "lmi_arrays",
    "lmi_control",
    "lmi_document",
    "lmi_folders",
    "lmi_later",
    "lmi_settings",
    "load",
    "model_defaults",
    "ollama",
    "openai",
    "prefix_cache",
    "reasoning",
    "request_fields",
    "responses",
    "sagemaker",
    "scoring",
    "structured_requests",
    "text_answers",
    "text_contract",
    "text_document",
    "text_exchanges",
    "text_limits",
    "text_models",
    "text_routes",
    "text_streams",
    "text_without_tokens",
    "tgi",
    "tool_calls",
    "tool_parameters",
    "vision",
)
_GENERATION_TESTS = (
    "exact_numbers",
    "generation_adapters",
    "generation_architectures",
    "generation_cache",
    "generation_details",
    "generation_faults",
    "generation_folder",
    "generation_formats",
    "generation_gpu_kernels",
    "generation_grammars",
    "generation_reference",
    "generation_sampling",
    "generation_scheduler",
    "generation_speculation",
    "generation_step_graphs",
    "generation_steps",
    "generation_templates",
    "generation_text",
    "generation_threads",
    "generation_vision",
    "grammar_texts",
    "json_schema",
    "message_forms",
    "token_sampler",
)
_MLSERVER_TESTS = (
    "columns",
    "details",
    "doctor",
    "files",
    "folder",
    "handlers",
    "huggingface",
    "models",
    "module",
    "runtimes",
    "settings",
)
_TRITON_TESTS = (
    "backend",
    "calls",
    "config",
    "ensembles",
    "instances",
    "load",
    "metrics",
    "module",
    "python",
    "repository",
    "sequences",
    "streams",
    "tensors",
    "timeouts",
)

TARGETS = (
    Target(
        "access",
        ("dragoman/access/*.py",),
        tuple(f"tests/access/test_{part}.py" for part in _ACCESS_TESTS),
    ),
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
    Target(
        "text_apis",
        ("dragoman_text/apis/*/*.py",),
        (
            *(f"tests/features/text/apis/test_{part}.py" for part in _TEXT_API_TESTS),
            "tests/access/test_roles_of_routes.py",
        ),
    ),
    Target(
        "generation",
        ("dragoman_text/generation/*.py",),
        (
            *(f"tests/features/text/generation/test_{part}.py" for part in _GENERATION_TESTS),
            "tests/features/text/apis/test_chat_templates.py",
            "tests/features/text/apis/test_model_defaults.py",
        ),
        without=("quantized*.py", "gguf*.py", "gpu_kernels.py"),  # the last one runs on a GPU, or in an interpreter
    ),
    Target(
        "mlserver",
        ("dragoman_mlserver/**/*.py",),
        (
            *(f"tests/features/mlserver/test_mlserver_{part}.py" for part in _MLSERVER_TESTS),
            "tests/runtimes/test_mlflow_scoring.py",
        ),
    ),
    Target(
        "triton",
        ("dragoman_triton/*.py",),
        tuple(f"tests/features/triton/test_triton_{part}.py" for part in _TRITON_TESTS),
    ),
    Target(
        "kserve",
        ("dragoman_kserve/*.py",),
        tuple(f"tests/features/kserve/test_kserve_{part}.py" for part in ("details", "doctor", "models")),
    ),
)
