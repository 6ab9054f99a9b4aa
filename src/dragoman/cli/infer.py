"""`dragoman infer URL MODEL NAME=VALUE...`: send one inference request and print the outputs."""

import argparse
import sys
from collections.abc import Iterator, Mapping
from typing import Any

from dragoman.cli.connection import KEY_HELP, ServerConnection, add_connection_arguments
from dragoman.cli.models import ModelPage, describe_tensor
from dragoman.cli.terminal import colour_text, printable, table
from dragoman.core.errors import InvalidInput, ServerError
from dragoman.core.options import suggestion

_EPILOG = f"""\
VALUE:
  32,212                 numbers; they get the shape that the model declares, if they fill it
  '[[1, 2], [3, 4]]'     JSON
  photo.npy, data.json             a file
  data.csv, data.csv:age,height    a table (csv, tsv, parquet) with a row on each line, or some of its columns
  photo.jpg, a.png,b.png           pictures (png, jpg, webp, bmp) as pixels in the declared size and layout
  speech.wav                       a sound as samples of one channel, from -1 to 1
  any other text         text, for a model that expects it
Without NAME= the value is for the only input of the model, or a table or one row of values for all of its columns; put
-- before values that begin with -. --data has all inputs at once: JSON, or a file, or - for standard input; a CSV file
has a column for each input, or all columns of the only one; an empty cell is NaN for floats.

{KEY_HELP}
examples:
  dragoman infer http://127.0.0.1:8080 celsius 32,212
  dragoman infer http://127.0.0.1:8080 iris X=5.1,3.5,1.4,0.2
  dragoman infer grpc://127.0.0.1:8081 iris --data flowers.csv --output label --json
  dragoman infer http://127.0.0.1:8080 iris X=flowers.csv:sepal_length,sepal_width,petal_length,petal_width
  dragoman infer http://127.0.0.1:8080 yolo photo.jpg --resize 640x640
  dragoman infer http://127.0.0.1:8080 vad speech.wav --sample-rate 16000
  dragoman infer http://127.0.0.1:8080 iris --data flowers.csv --format csv > labels.csv
  dragoman infer http://127.0.0.1:8080 iris              shows the inputs of the model
  dragoman infer http://127.0.0.1:8080 vad input=speech.wav --example   with the other inputs of the example
  dragoman infer http://127.0.0.1:8080 iris --example    sends an example that the model answers

Exit status: 0 success, 1 if the model fails, 2 if the request is invalid or the server cannot be reached.
"""
_FORMATS = ("table", "json", "csv", "npy")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments of the command."""
    parser.usage = "dragoman infer URL MODEL [options] [[NAME=]VALUE ...]"
    parser.description = "Send an inference request to a server of the Open Inference Protocol, over REST or gRPC."
    parser.epilog = _EPILOG
    add = parser.add_argument
    add("url", metavar="URL", help="http://HOST:PORT or grpc://HOST:PORT")
    add("model", metavar="NAME", help="name of the model")
    add(
        "values",
        nargs="*",
        default=[],
        metavar="VALUE",
        help="NAME=VALUE of an input, or a value for each without names",
    )
    add("--data", metavar="FILE", help="all inputs: a file, -, or JSON")
    add("--example", action="store_true", help="take inputs that are not given from an example that the model answers")
    add("--version", default="", metavar="V", help="version of the model")
    add("--output", action="append", metavar="NAME", help="an output to return (default: all); may be repeated")
    add("--format", choices=_FORMATS, default="table", help="table with class names, or exact values (default: table)")
    add("--parameters", default="{}", metavar="JSON", help="parameters of the request")
    add("--stream", action="store_true", help="print the responses of a streaming model as they arrive")
    add_connection_arguments(parser, timeout_s=60.0)
    add = parser.add_argument_group("pictures and sounds").add_argument
    add(
        "--resize", default="", metavar="WxH", help="size in pixels, or own (default: that of the input or the example)"
    )
    fits = ("stretch", "letterbox", "crop")
    add("--fit", choices=fits, default="", help="to that size (default: crop for classifiers, letterbox for detectors)")
    add("--letterbox", action="store_const", dest="fit", const="letterbox", help="the same as --fit letterbox")
    add(
        "--scale",
        default="",
        metavar="RANGE",
        help="LOW..HIGH, or imagenet (default: imagenet for 1000 classes, else 0..1 for floats)",
    )
    add("--layout", choices=("nchw", "nhwc"), default="", help="order of axes (default: where the channels are)")
    add("--sample-rate", type=int, default=0, metavar="HZ", help="rate of a sound (default: that of the file)")


def run(arguments: argparse.Namespace) -> int:
    """Send the request and print the outputs; return the exit status."""
    from dragoman.cli.input_values import examples, fill_inputs, missing_inputs, parse_inputs, parse_json
    from dragoman.cli.media import Media

    parameters = parse_json(arguments.parameters, dict, "--parameters")
    if arguments.json:
        arguments.format = "json"
    if arguments.stream and arguments.format in ("csv", "npy"):
        raise InvalidInput(f"--stream: expected --format table or json, got {arguments.format}")
    connection = ServerConnection.of(arguments, arguments.url)
    with connection.client() as client, connection.suggesting(arguments.model), connection.explaining(arguments.model):
        signature = client.metadata(arguments.model, arguments.version).signature
        about = ModelPage(connection, arguments.model, arguments.version)
        if not arguments.values and arguments.data is None and not arguments.example:
            print("\n".join(_usage(arguments, signature)))
            return 2
        media = Media(
            arguments.resize,
            arguments.fit,
            arguments.scale,
            arguments.layout,
            arguments.sample_rate,
            about.example_shape,
            signature.outputs,
        )
        inputs = parse_inputs(arguments.values, arguments.data, signature, media)
        if media.has_pictures and arguments.format == "table" and about.picture_hint:
            media.notes.append(about.picture_hint)
        for note in media.notes:
            print(colour_text(printable(note), "2", sys.stderr), file=sys.stderr)
        if arguments.example:
            candidates = examples(connection, arguments.model, arguments.version, signature)
            return _try_examples(client, arguments, fill_inputs(inputs, candidates), parameters, about)
        try:
            _infer(client, arguments, inputs, parameters, about)
        except InvalidInput as error:
            missing = missing_inputs(inputs, signature)
            hint = f"; not given: {missing}" if missing else ""
            raise InvalidInput(error.message.rstrip(".") + _output_hint(arguments, error, signature) + hint) from error
        except ServerError as error:
            print(f"dragoman: {printable(error.message)}", file=sys.stderr)
            return 1
    return 0


def _output_hint(arguments: argparse.Namespace, error: InvalidInput, signature: Any) -> str:
    """Return which output may be meant, if the server has rejected the name of one."""
    known = [spec.name for spec in signature.outputs]
    wrong = next((o for o in arguments.output or () if o not in known and f"'{o}'" in error.message), "")
    return suggestion(wrong, known) if wrong else ""


def _infer(
    client: Any, arguments: argparse.Namespace, inputs: Any, parameters: Mapping[str, Any], about: ModelPage
) -> None:
    """Send a request and print its outputs."""
    from dragoman.cli.output_values import print_result

    # Scores with class names for a reader, unless they were not asked for; programs get what the model returns.
    outputs = arguments.output or (about.outputs if arguments.format == "table" else []) or None
    options: Any = {"version": arguments.version, "outputs": outputs, "parameters": parameters}
    if arguments.stream:
        results = client.stream(arguments.model, inputs, **options)
    else:
        results = [client.infer(arguments.model, inputs, **options)]
    for result in results:
        print_result(result, arguments.format, about.labels if arguments.format == "table" else {})


def _try_examples(
    client: Any,
    arguments: argparse.Namespace,
    candidates: Iterator[Any],
    parameters: Mapping[str, Any],
    about: ModelPage,
) -> int:
    """Send examples until one is answered; return the exit status. Raises the first InvalidInput if none is."""
    first: InvalidInput | ServerError | None = None
    for inputs in candidates:
        try:
            _infer(client, arguments, inputs, parameters, about)
        except (InvalidInput, ServerError) as error:
            first = first or error
        else:
            return 0
    if isinstance(first, InvalidInput):
        raise first
    print(f"dragoman: {printable(first.message if first else 'no example')}", file=sys.stderr)
    return 1


def _usage(arguments: argparse.Namespace, signature: Any) -> Iterator[str]:
    """Yield the inputs and outputs of the model."""
    rows = [("", "name", "datatype and shape")]
    for side, specs in (("input", signature.inputs), ("output", signature.outputs)):
        rows += [(side, spec.name, describe_tensor(spec)) for spec in specs]
    yield from table(rows) if len(rows) > 1 else ["the model declares no inputs"]
    yield ""
    names = " ".join(f"{spec.name}=..." for spec in signature.inputs) or "NAME=..."
    yield printable(f"expected values: dragoman infer {arguments.url} {arguments.model} {names}, or --example")
