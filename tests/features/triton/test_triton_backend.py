"""The Python backend and its module as values: requests, responses, metrics, the log, configurations."""

import json
import logging
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import dragoman
from dragoman.core.calls import Infer, Request
from dragoman.core.errors import DragomanError
from dragoman.core.tensor import Tensor
from dragoman.engine.engine import Engine
from dragoman.formats.model_config import parse_config
from dragoman_triton import pb_utils
from dragoman_triton.config import FIELDS, read_model, remarks
from features.triton.repository import write

HEAD = """
import json
import numpy as np
import triton_python_backend_utils as pb_utils

def tell(rows=(), **values):
    text = np.full((*rows, 1), json.dumps(values), object)
    return pb_utils.InferenceResponse([pb_utils.Tensor("OUT", text)])
"""
MODELS = {
    "tells": """
class TritonPythonModel:
    calls = 0

    def initialize(self, args):
        config, folder = json.loads(args.pop("model_config")), args.pop("model_repository")
        self.args = {**args, "config": config["name"], "folder": folder.rpartition("/")[2]}

    def execute(self, requests):
        self.calls += 1
        return [tell(r.inputs()[0].shape()[:-1], name=r.model_name, version=r.model_version,
                     id=r.request_id(), timeout=r.timeout(),
                     parameters=json.loads(r.parameters()), outputs=list(r.requested_output_names()),
                     inputs=[t.name() for t in r.inputs()], together=len(requests), calls=self.calls,
                     args=self.args)
                for r in requests]
""",
    # Returns what IN says.
    "returns": """
class TritonPythonModel:
    def execute(self, requests):
        kind = int(requests[0].inputs()[0].as_numpy().ravel()[0])
        return [None, [None], [5], [tell(), tell()], [tell()], []][kind]
""",
}
CONFIG = """
backend: "python" {}
input {{ name: "IN" data_type: TYPE_INT32 dims: 1 }}
output {{ name: "OUT" data_type: TYPE_STRING dims: 1 }}
"""
WARMUP = """
max_batch_size: 4
model_warmup { name: "w" batch_size: 2 count: 3
  inputs { key: "IN" value { data_type: TYPE_INT32 dims: 1 zero_data: true } } }
"""


@pytest.fixture
async def engine(tmp_path: Path) -> AsyncIterator[Engine]:
    for name, source, options in (
        ("tells", "tells", ""),
        ("warm", "tells", WARMUP),
        ("returns", "returns", ""),
    ):
        write(tmp_path / name / "config.pbtxt", CONFIG.format(options))
        write(tmp_path / name / "3" / "model.py", HEAD + MODELS[source])
    async with dragoman.open_engine(tmp_path, trial_s=0) as engine:
        yield engine


async def call(engine: Engine, model: str, n: Any, **parameters: Any) -> Any:
    infer = Infer({"IN": Tensor.of(np.array(n, np.int32))}, parameters=parameters)
    response: Any = await engine.call(Request(infer, model, id="i"))
    return json.loads(response.answer.outputs["OUT"].data.ravel().tolist()[0])


async def test_what_a_model_sees_of_a_request(engine: Engine) -> None:
    assert await call(engine, "tells", [7], own="x", timeout=5_000_000, priority=1) == {
        "name": "tells",
        "version": 3,
        "id": "i",
        "timeout": 5_000_000,
        "parameters": {"own": "x"},
        "outputs": ["OUT"],
        "inputs": ["IN"],
        "together": 1,
        "calls": 1,
        "args": {
            "model_instance_kind": "CPU",
            "model_instance_name": "tells_0_0",
            "model_instance_device_id": "0",
            "model_version": "3",
            "model_name": "tells",
            "config": "tells",
            "folder": "tells",
        },
    }
    assert (await call(engine, "tells", [7]))["timeout"] == 0
    # Three warm-up requests came before; without a batcher each request comes alone.
    found = await call(engine, "warm", [[7], [8]])
    assert (found["name"], found["calls"], found["together"]) == ("warm", 4, 1)


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        (0, "Expected a list in the execute return, found type 'NoneType'"),
        (1, "Expected an 'InferenceResponse' object in the execute function return list, found type 'NoneType'"),
        (2, "Expected an 'InferenceResponse' object in the execute function return list, found type 'int'"),
        (
            3,
            "objects do not match the number of InferenceRequest objects. Expected 1, got 2",
        ),
        (
            5,
            "objects do not match the number of InferenceRequest objects. Expected 1, got 0",
        ),
    ],
)
async def test_what_a_model_may_return(engine: Engine, kind: int, message: str) -> None:
    with pytest.raises(DragomanError) as error:
        await call(engine, "returns", [kind])
    assert message in error.value.message
    assert await call(engine, "returns", [4]) == {}  # the model goes on


# --- the module ------------------------------------------------------------------------------------------------------


def test_levels_of_the_log(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG, "dragoman.model")
    logger = pb_utils.Logger
    for write_line in (logger.log_info, logger.log_warn, logger.log_error, logger.log_verbose, logger.log):
        write_line("100 %s")
    logger.log("a", logger.ERROR)
    assert [(record.levelno, record.message) for record in caplog.records] == [
        (logging.INFO, "100 %s"),
        (logging.WARNING, "100 %s"),
        (logging.ERROR, "100 %s"),
        (logging.DEBUG, "100 %s"),
        (logging.INFO, "100 %s"),
        (logging.ERROR, "a"),
    ]


def test_metrics_of_each_kind() -> None:
    family = pb_utils.MetricFamily
    counter = family("backend_counter", "Text.", family.COUNTER).Metric({"a": "b"})
    gauge = family("backend_gauge", "Text.", family.GAUGE).Metric()
    histogram = family("backend_histogram", "Text.", family.HISTOGRAM).Metric({"a": "b"}, [1.0, 2.0])
    counter.increment(2)
    counter.increment(0)
    gauge.set(5)
    gauge.increment(-1.5)
    histogram.observe(1.5)
    assert (counter.value(), gauge.value()) == (2.0, 3.5)
    # One metric for each set of labels, whichever family object asks.
    assert family("backend_counter", "", family.COUNTER).Metric({"a": "b"}) is counter
    assert family("backend_counter", "", family.COUNTER).Metric({"a": "c"}) is not counter
    for change, message in (
        (lambda: counter.increment(-1), "counters only increase: expected 0 or more, got -1"),
        (lambda: counter.set(1), "set is not supported for counters and histograms"),
        (lambda: histogram.set(1), "set is not supported for counters and histograms"),
        (lambda: histogram.increment(1), "increment is not supported for histograms"),
        (histogram.value, "value is not supported for histograms"),
        (lambda: counter.observe(1), "observe is not supported for counters and gauges"),
        (lambda: gauge.observe(1), "observe is not supported for counters and gauges"),
        (lambda: family("backend_gauge", "", family.COUNTER), "metric 'backend_gauge' exists with another kind"),
        (lambda: family("backend_gauge", "", family.GAUGE).Metric(buckets=[1.0]), "buckets: only histograms have them"),
        (lambda: family("backend_histogram", "", family.HISTOGRAM).Metric(), "buckets: expected the upper bounds"),
    ):
        with pytest.raises(ValueError, match=message):
            change()
    prometheus_client = pytest.importorskip("prometheus_client")
    text = prometheus_client.generate_latest().decode()
    for line in (
        "# HELP backend_counter_total Text.",
        'backend_counter_total{a="b"} 2.0',
        "backend_gauge 3.5",
        'backend_histogram_bucket{a="b",le="1.0"} 0.0',
        'backend_histogram_bucket{a="b",le="2.0"} 1.0',
        'backend_histogram_sum{a="b"} 1.5',
    ):
        assert line in text


def test_a_configuration_that_a_model_completes() -> None:
    change: Any
    config = pb_utils.ModelConfig('{"name": "m", "max_batch_size": 2}')
    config.set_max_batch_size(4)  # that of the file stays
    config.add_input({"name": "x", "data_type": "TYPE_FP32", "dims": (1,), "optional": True})
    config.add_input({"name": "x", "data_type": "TYPE_FP32", "dims": [1]})
    config.add_output({"name": "y", "data_type": "TYPE_INT8", "dims": [2]})
    config.set_dynamic_batching()
    config.set_model_transaction_policy({"decoupled": True})
    config.set_model_transaction_policy({"decoupled": True})
    assert config.as_dict() == {
        "name": "m",
        "max_batch_size": 2,
        "input": [{"name": "x", "data_type": "TYPE_FP32", "dims": [1], "optional": True}],
        "output": [{"name": "y", "data_type": "TYPE_INT8", "dims": [2]}],
        "dynamic_batching": {},
        "model_transaction_policy": {"decoupled": True},
    }
    for change, message in (
        (lambda: config.set_max_batch_size(1), "max_batch_size: expected 2 or more, as config.pbtxt has, got 1"),
        (lambda: config.set_model_transaction_policy({"other": 1}), "expected decoupled, got other"),
        (
            lambda: pb_utils.ModelConfig(
                {"model_transaction_policy": {"decoupled": True}}
            ).set_model_transaction_policy({}),
            "for model '', which is already set to 'True'",
        ),
        (lambda: config.set_model_transaction_policy({"decoupled": False}), "'m', which is already set to 'True'"),
        (lambda: config.add_input({"name": "z"}), "input: expected name, data_type and dims; missing data_type, dims"),
        (
            lambda: config.add_output({"name": "y", "data_type": "TYPE_INT8", "dims": [2], "optional": True}),
            "output 'y': unknown property optional",
        ),
        (
            lambda: config.add_output({"name": "y", "data_type": "TYPE_INT8", "dims": [3]}),
            "output 'y': config.pbtxt has another data_type or other dims",
        ),
        (lambda: pb_utils.ModelConfig({"sequence_batching": {}}).set_dynamic_batching(), "config.pbtxt has sequence_"),
    ):
        with pytest.raises(ValueError, match=message):
            change()
    empty = pb_utils.ModelConfig({})
    empty.set_max_batch_size(3)
    assert empty.as_dict() == {"max_batch_size": 3}
    given = pb_utils.ModelConfig({"input": [{"name": "x", "data_type": "TYPE_INVALID", "dims": []}]})
    given.add_input({"name": "x", "data_type": "TYPE_FP32", "dims": [4]})
    assert given.as_dict()["input"] == [{"name": "x", "data_type": "TYPE_FP32", "dims": [4]}]


# --- fields that are not honoured ------------------------------------------------------------------------------------


EFFECTS = {
    "different": """
        input.allow_ragged_batch dynamic_batching.preferred_batch_size sequence_batching.oldest.preferred_batch_size
        response_cache
    """,
    "rejected": """
        input.is_shape_tensor output.is_shape_tensor input.is_non_linear_format_io output.is_non_linear_format_io
        batch_input batch_output model_operations model_repository_agents runtime
    """,
    "unused": """
        instance_group.profile dynamic_batching.preserve_ordering sequence_batching.direct.max_queue_delay_microseconds
        sequence_batching.direct.minimum_slot_utilization sequence_batching.oldest.max_queue_delay_microseconds
        sequence_batching.oldest.preserve_ordering sequence_batching.state.use_same_buffer_for_input_output
        sequence_batching.state.use_growable_memory optimization.cuda
    """,
    "missing": """
        instance_group.passive instance_group.host_policy instance_group.secondary_devices instance_group.rate_limiter
        instance_group.gpus cc_model_filenames metric_tags model_metrics ensemble_scheduling.step.model_namespace
    """,
}


def test_the_effect_of_each_field() -> None:
    """Each is a field of Triton's configuration."""
    assert {path: effect for path, (effect, _) in FIELDS.items()} == {
        path: effect for effect, paths in EFFECTS.items() for path in paths.split()
    }
    assert all(isinstance(note, str) and len(note) > 10 for _, note in FIELDS.values())
    for path in FIELDS:
        kind = parse_config("", "file").message.DESCRIPTOR
        for name in path.split("."):
            assert name in kind.fields_by_name, path
            kind = kind.fields_by_name[name].message_type


def test_remarks_on_parameters_and_devices(tmp_path: Path) -> None:
    def found(config: str) -> dict[str, str]:
        write(tmp_path / "m" / "config.pbtxt", config)
        return {r.subject: r.effect for r in remarks(read_model(tmp_path / "m"), "file")}

    parameters = "".join(
        f'parameters {{ key: "{name}" value {{ string_value: "1" }} }}\n'
        for name in ("intra_op_thread_count", "inter_op_thread_count", "execution_mode", "providers", "other",
                     "EXECUTION_ENV_PATH", "FORCE_CPU_ONLY_INPUT_TENSORS")
    )  # fmt: skip
    tensors = CONFIG.format("").partition("\n")[2].partition("\n")[2]
    unused = {"parameters.other": "unused"}
    theirs = {"parameters.EXECUTION_ENV_PATH": "unused", "parameters.FORCE_CPU_ONLY_INPUT_TENSORS": "unused"}
    assert found(f'backend: "onnxruntime"\n{tensors}{parameters}') == unused | theirs
    assert found(f'backend: "python"\n{tensors}{parameters}') == {**theirs, "parameters.EXECUTION_ENV_PATH": "missing"}
    gpu = "instance_group { kind: KIND_GPU }\n"
    assert found(f'backend: "onnxruntime"\n{tensors}{gpu}') == {"instance_group.kind": "missing"}
    assert found(f'backend: "python"\n{tensors}{gpu}') == {}
    assert found(f'backend: "python"\n{tensors}response_cache {{ enable: true }}') == {"response_cache": "different"}
    assert found(f'backend: "python"\n{tensors}my_field: 3') == {"my_field": "unused"}
