"""SavedModels and frozen graphs whose operators use files are not loaded, wherever the operators are."""

import os
import re
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from dragoman.core.calls import Infer
from dragoman.core.errors import ModelFailed
from dragoman.core.spec import ModelSpec
from dragoman.core.tensor import Tensor
from dragoman.runtimes.tensorflow import _SIDE_EFFECTS, TensorFlowModel, _base

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
tf: Any = None
SECRET = b"secret"


@pytest.fixture(scope="module", autouse=True)
def _import_tensorflow() -> None:
    global tf
    tf = pytest.importorskip("tensorflow")


@pytest.fixture
def secret(tmp_path: Path) -> str:
    path = tmp_path / "secret"
    path.write_bytes(SECRET)
    return str(path)


def _load(path: Path, **settings: Any) -> TensorFlowModel:
    model = TensorFlowModel(ModelSpec(name="m", uri=str(path), **settings))
    model.load()
    return model


def _infer(model: TensorFlowModel, output: str = "y", values: Any = (b"a",)) -> list[Any]:
    found = model.infer(Infer({"x": Tensor.of(np.array(values, dtype=object))}))
    assert isinstance(found, dict)
    return [*np.asarray(found[output]).ravel().tolist()]


def _save(path: Path, serve: Callable[[Any], Any], module: Any = None) -> Path:
    """Save a SavedModel of version 2 with the signature of a function of texts."""
    module = tf.Module() if module is None else module
    module.serve = tf.function(serve, input_signature=[tf.TensorSpec([None], tf.string, name="x")])
    tf.saved_model.save(module, str(path), signatures=module.serve)
    return path


def _save_first(path: Path, build: Callable[[Any], Any], init: Callable[[], Any] = lambda: None) -> Path:
    """Save a SavedModel of version 1, which has a variable, whose output is built from its input."""
    v1 = tf.compat.v1
    with tf.Graph().as_default(), v1.Session() as session:
        x = v1.placeholder(tf.string, [None], name="x")
        weight = v1.get_variable("w", initializer=tf.constant([b"w"]), use_resource=True)
        init_op = init()
        y = tf.strings.join([build(x), weight])
        session.run(v1.global_variables_initializer())
        builder = v1.saved_model.builder.SavedModelBuilder(str(path))
        signature = v1.saved_model.predict_signature_def({"x": x}, {"y": y})
        builder.add_meta_graph_and_variables(
            session, ["serve"], {"serving_default": signature}, main_op=init_op, strip_default_attrs=False
        )
        builder.save()
    return path


def _refused(path: Path, *operators: str) -> None:
    names = ", ".join(map(re.escape, operators))
    with pytest.raises(ModelFailed, match=f"is not loaded: it uses {names}, by which a model can use files"):
        _load(path)


def test_a_signature_reads_a_file(tmp_path: Path, secret: str) -> None:
    path = _save(tmp_path / "saved", lambda x: {"y": tf.io.read_file(x[0])})
    _refused(path, "ReadFile")
    assert _infer(_load(path, allow_pickle=True), values=[secret.encode()]) == [SECRET]


def test_an_operator_is_found_in_functions_of_functions(tmp_path: Path, secret: str) -> None:
    inner = tf.function(lambda path: tf.cond(tf.strings.length(path) > 0, lambda: tf.io.read_file(path), lambda: path))

    def serve(x: Any) -> Any:
        return {"y": tf.map_fn(lambda path: inner(path), x)}

    path = _save(tmp_path / "saved", serve)
    _refused(path, "ReadFile")
    assert _infer(_load(path, allow_pickle=True), values=[secret.encode()]) == [SECRET]


def test_files_are_not_written_when_it_is_loaded(tmp_path: Path) -> None:
    written = tmp_path / "written"

    class Table(tf.saved_model.experimental.TrackableResource):  # type: ignore[misc]
        def _create_resource(self) -> Any:
            return tf.raw_ops.MutableHashTableV2(key_dtype=tf.string, value_dtype=tf.int64)

        def _initialize(self) -> None:
            tf.io.write_file(str(written), "x")

    module = tf.Module()
    module.table = Table()
    module.table.resource_handle  # noqa: B018 (creates it)
    path = _save(tmp_path / "saved", lambda x: {"y": x}, module)
    written.unlink(missing_ok=True)
    _refused(path, "WriteFile")
    assert not written.exists()
    _load(path, allow_pickle=True)
    assert written.read_bytes() == b"x"


def test_a_dataset_in_a_function_of_an_attribute_is_found(tmp_path: Path, secret: str) -> None:
    def serve(x: Any) -> Any:
        return {"y": tf.data.TextLineDataset(x).reduce(tf.constant(""), lambda total, line: total + line)}

    path = _save(tmp_path / "saved", serve)
    _refused(path, "TextLineDataset")


def test_a_graph_of_version_1(tmp_path: Path, secret: str) -> None:
    path = _save_first(tmp_path / "reads", lambda x: tf.io.read_file(x[0]))
    _refused(path, "ReadFile")
    assert _infer(_load(path, allow_pickle=True), values=[secret.encode()]) == [SECRET + b"w"]
    plain = _save_first(tmp_path / "plain", tf.strings.upper)  # its variable is restored from its own file
    assert _infer(_load(plain)) == [b"Aw"]


def test_what_a_graph_of_version_1_runs_when_it_is_loaded(tmp_path: Path) -> None:
    written = tmp_path / "written"
    path = _save_first(tmp_path / "main", tf.identity, lambda: tf.io.write_file(str(written), "x"))
    _refused(path, "WriteFile")

    def local() -> None:
        with tf.control_dependencies([tf.io.write_file(str(written), "x")]):
            value = tf.constant(1.0)
        tf.compat.v1.Variable(value, collections=[tf.compat.v1.GraphKeys.LOCAL_VARIABLES], use_resource=True)

    path = _save_first(tmp_path / "local", tf.identity, local)
    _refused(path, "WriteFile")
    assert not written.exists()
    _load(path, allow_pickle=True)
    assert written.read_bytes() == b"x"


def test_variables_are_restored_from_the_folder_only(tmp_path: Path) -> None:
    from tensorflow.core.protobuf.saved_model_pb2 import SavedModel

    path = _save_first(tmp_path / "saved", tf.identity)
    file = path / "saved_model.pb"
    message = SavedModel.FromString(file.read_bytes())
    graph = message.meta_graphs[0].graph_def
    other = graph.node.add(name="other", op="Const")
    other.attr["dtype"].type = tf.string.as_datatype_enum
    other.attr["value"].tensor.CopyFrom(tf.make_tensor_proto("/other/variables"))
    (restore,) = (node for node in graph.node if node.op == "RestoreV2")
    restore.input[0] = "other"
    file.write_bytes(message.SerializeToString())
    _refused(path, "RestoreV2")


def test_variables_of_version_2_loaded_as_version_1(tmp_path: Path) -> None:
    """TensorFlow loads a file with several graphs as one of version 1."""
    from tensorflow.core.protobuf.saved_model_pb2 import SavedModel

    module = tf.Module()
    module.word = tf.Variable([b"w"])
    path = _save(tmp_path / "saved", lambda x: {"y": tf.strings.join([x, module.word])}, module)
    file = path / "saved_model.pb"
    message = SavedModel.FromString(file.read_bytes())
    message.meta_graphs.add().meta_info_def.tags.append("other")
    graph = message.meta_graphs[0]
    file.write_bytes(message.SerializeToString())
    assert _infer(_load(path)) == [b"aw"]

    def refused(edit: Callable[[Any, Any], None]) -> None:
        changed = SavedModel.FromString(message.SerializeToString())
        (graph,) = changed.meta_graphs[:1]
        nodes = {node.name: node for node in graph.graph_def.node}
        other = graph.graph_def.node.add(name="other", op="Const")
        other.attr["dtype"].type = tf.string.as_datatype_enum
        other.attr["value"].tensor.CopyFrom(tf.make_tensor_proto("/other/variables"))
        edit(graph.graph_def, nodes[graph.saver_def.restore_op_name])
        file.write_bytes(changed.SerializeToString())
        _refused(path, "RestoreV2")

    def restore_other(_graph: Any, restore: Any) -> None:
        restore.input[0] = "other"

    def restore_once_more(graph: Any, restore: Any) -> None:
        again = graph.node.add()
        again.CopyFrom(restore)
        again.name, again.input[0] = "again", "other"
        restore.input.append("^again")

    assert graph.saver_def.restore_op_name
    refused(restore_other)
    refused(restore_once_more)


# --- tables from files --------------------------------------------------------------------------------------


def _table(path: str) -> Any:
    number = tf.lookup.TextFileIndex.LINE_NUMBER
    line = tf.lookup.TextFileIndex.WHOLE_LINE
    source = tf.lookup.TextFileInitializer(path, tf.int64, number, tf.string, line)
    return tf.lookup.StaticHashTable(source, "")


def _save_with_vocabulary(path: Path, vocabulary: str) -> Path:
    module = tf.Module()
    module.table = _table(vocabulary)
    return _save(path, lambda x: {"y": module.table.lookup(tf.strings.to_number(x, tf.int64))}, module)


def test_a_vocabulary_of_the_folder_is_read(tmp_path: Path) -> None:
    (tmp_path / "words").write_text("zero\none\n")
    path = _save_with_vocabulary(tmp_path / "saved", str(tmp_path / "words"))
    (tmp_path / "words").unlink()
    assert _infer(_load(path), values=[b"1", b"0"]) == [b"one", b"zero"]


def test_another_file_is_not_read_as_a_vocabulary(tmp_path: Path, secret: str) -> None:
    from tensorflow.core.protobuf.saved_model_pb2 import SavedModel

    (tmp_path / "words").write_text("zero\n")
    path = _save_with_vocabulary(tmp_path / "saved", str(tmp_path / "words"))
    file = path / "saved_model.pb"
    original = file.read_bytes()

    def change(edit: Callable[[Any], None]) -> None:
        message = SavedModel.FromString(original)
        edit(message.meta_graphs[0])
        file.write_bytes(message.SerializeToString())

    def set_asset(graph: Any) -> None:
        graph.asset_file_def[0].filename = "../../secret"

    change(set_asset)
    _refused(path, "asset '../../secret'")
    assert _infer(_load(path, allow_pickle=True), values=[b"0"]) == [SECRET]

    def set_constant(graph: Any) -> None:
        for function in graph.graph_def.library.function:
            for node in function.node_def:
                if node.op == "InitializeTableFromTextFileV2":
                    constant = function.node_def.add(name="other", op="Const")
                    constant.attr["dtype"].type = tf.string.as_datatype_enum
                    constant.attr["value"].tensor.CopyFrom(tf.make_tensor_proto(secret))
                    node.input[1] = "other:output:0"
                    return

    change(set_constant)
    _refused(path, "InitializeTableFromTextFileV2")
    assert _infer(_load(path, allow_pickle=True), values=[b"0"]) == [SECRET]

    def call_with_a_constant(graph: Any) -> None:
        """Call the function that reads the table, once more, from another one."""
        library = graph.graph_def.library
        (reader,) = (
            f.signature.name for f in library.function if any("FromTextFile" in node.op for node in f.node_def)
        )
        for function in library.function:
            for node in function.node_def:
                if node.op == "LookupTableFindV2":
                    call = function.node_def.add(name="call", op="StatefulPartitionedCall")
                    call.attr["f"].func.name = reader
                    return

    change(call_with_a_constant)
    _refused(path, "InitializeTableFromTextFileV2")


def test_vocabularies_of_graphs_of_version_1(tmp_path: Path, secret: str) -> None:
    from tensorflow.core.protobuf.saved_model_pb2 import SavedModel

    (tmp_path / "words").write_text("zero\none\n")

    def look_up(x: Any) -> Any:
        return _table(str(tmp_path / "words")).lookup(tf.strings.to_number(x, tf.int64))

    v1 = tf.compat.v1
    path = tmp_path / "saved"
    with tf.Graph().as_default(), v1.Session() as session:
        x = v1.placeholder(tf.string, [None], name="x")
        y = look_up(x)
        builder = v1.saved_model.builder.SavedModelBuilder(str(path))
        builder.add_meta_graph_and_variables(
            session,
            ["serve"],
            {"serving_default": v1.saved_model.predict_signature_def({"x": x}, {"y": y})},
            assets_collection=v1.get_collection(v1.GraphKeys.ASSET_FILEPATHS),
            main_op=v1.tables_initializer(),
        )
        builder.save()
    (tmp_path / "words").unlink()
    assert _infer(_load(path), values=[b"1"]) == [b"one"]
    # The same operator, run by a call, would read the file that its own constant names.
    file = path / "saved_model.pb"
    message = SavedModel.FromString(file.read_bytes())
    graph = message.meta_graphs[0]
    (reader,) = (node.name for node in graph.graph_def.node if "FromTextFile" in node.op)
    (find,) = (node for node in graph.graph_def.node if node.op.startswith("LookupTableFind"))
    find.input.append(f"^{reader}")
    file.write_bytes(message.SerializeToString())
    _refused(path, "InitializeTableFromTextFileV2")


# --- frozen graphs, and all operators ------------------------------------------------------------------------


def test_a_frozen_graph_reads_a_file(tmp_path: Path, secret: str) -> None:
    path = tmp_path / "m.pb"
    with tf.Graph().as_default() as graph:
        x = tf.compat.v1.placeholder(tf.string, [None], name="x")
        tf.identity(tf.io.read_file(x[0]), name="y")
    path.write_bytes(graph.as_graph_def().SerializeToString())
    _refused(path, "ReadFile")
    assert _infer(_load(path, allow_pickle=True), values=[secret.encode()]) == [SECRET]


def test_a_frozen_graph_prints_to_a_file(tmp_path: Path) -> None:
    for stream, is_refused in ((sys.stderr, False), (f"file://{tmp_path}/written", True)):
        path = tmp_path / "m.pb"
        with tf.Graph().as_default() as graph:
            x = tf.compat.v1.placeholder(tf.string, [None], name="x")
            with tf.control_dependencies([tf.print(x[0], output_stream=stream)]):
                tf.identity(x, name="y")
        path.write_bytes(graph.as_graph_def().SerializeToString())
        if is_refused:
            _refused(path, "PrintV2")
        else:
            assert _load(path).signature().outputs[0].name == "y"


def test_each_operator_with_a_file_among_its_arguments_is_known() -> None:
    """A new operator of TensorFlow that uses files must be added to the list."""
    from tensorflow.core.framework.op_def_pb2 import OpList
    from tensorflow.python.client import pywrap_tf_session

    operators = OpList.FromString(pywrap_tf_session.TF_GetBuffer(pywrap_tf_session.TF_GetAllOpList())).op
    assert len(operators) > 1000
    words = re.compile(
        r"(?:^|_)(?:\w*file\w*|path|dir|directory|\w*urls?|address|server|socket|command|prefix|logdir)(?:$|_)"
    )
    found = {
        _base(SimpleNamespace(op=each.name))
        for each in operators
        if any(words.search(argument.name) for argument in (*each.input_arg, *each.attr))
    }
    # `is_files` is a remark about texts; the prefix is that of a statistic.
    assert found - _SIDE_EFFECTS == {"TensorSliceDataset", "SetStatsAggregatorDataset"}
    assert not _SIDE_EFFECTS - {_base(SimpleNamespace(op=each.name)) for each in operators}
