// @grpc/grpc-js: Open Inference over gRPC from a JavaScript client.

import assert from "node:assert/strict";
import { promisify } from "node:util";
import test from "node:test";
import grpc from "@grpc/grpc-js";
import protoLoader from "@grpc/proto-loader";
import { grpc as address } from "./addresses.mjs";

const options = { keepCase: true, longs: Number, enums: String, defaults: true };
const { inference } = grpc.loadPackageDefinition(protoLoader.loadSync(process.env.DRAGOMAN_PROTO, options));
const client = new inference.GRPCInferenceService(address, grpc.credentials.createInsecure());
const call = (method, request, ...more) => promisify(client[method]).call(client, request, ...more);

const texts = (...values) => Buffer.concat(values.flatMap((text) => [length(text), Buffer.from(text)]));
const length = (text) => {
  const prefix = Buffer.alloc(4);
  prefix.writeUInt32LE(Buffer.byteLength(text));
  return prefix;
};
const request = (more = {}) => ({
  model_name: "Doubler",
  id: "7",
  inputs: [
    { name: "x", datatype: "FP32", shape: [2, 2] },
    { name: "s", datatype: "BYTES", shape: [2] },
  ],
  raw_input_contents: [Buffer.from(Float32Array.of(1.5, -2, 0, 3).buffer), texts("a", "bc")],
  ...more,
});
const numbers = (buffer) => [...new Float32Array(Uint8Array.from(buffer).buffer)];

test("health", async () => {
  assert.ok((await call("ServerLive", {})).live);
  assert.ok((await call("ServerReady", {})).ready);
  assert.ok((await call("ModelReady", { name: "Doubler" })).ready);
});

test("metadata", async () => {
  assert.equal((await call("ServerMetadata", {})).name, "dragoman");
  const { inputs } = await call("ModelMetadata", { name: "Doubler" });
  assert.deepEqual(inputs.map((input) => input.name), ["x", "s"]);
});

test("infer with raw contents", async () => {
  const response = await call("ModelInfer", request());
  assert.deepEqual([response.id, response.outputs.map((output) => output.name)], ["7", ["y", "t"]]);
  assert.deepEqual(numbers(response.raw_output_contents[0]), [3, -4, 0, 6]);
  assert.deepEqual(response.raw_output_contents[1], texts("aa", "bcbc"));
});

test("infer with typed contents", async () => {
  const inputs = [
    { name: "x", datatype: "FP32", shape: [1, 2], contents: { fp32_contents: [1, 2] } },
    { name: "s", datatype: "BYTES", shape: [1], contents: { bytes_contents: [Buffer.from("a")] } },
  ];
  const { raw_output_contents, outputs } = await call("ModelInfer", request({ inputs, raw_input_contents: [] }));
  const y = raw_output_contents.length ? numbers(raw_output_contents[0]) : outputs[0].contents.fp32_contents;
  assert.deepEqual(y, [2, 4]);
});

test("concurrent calls", async () => {
  const found = await Promise.all([...Array(16).keys()].map((i) => call("ModelInfer", request({ id: String(i) }))));
  assert.deepEqual(found.map((each) => each.id), [...Array(16).keys()].map(String));
});

test("stream", async () => {
  const stream = client.ModelStreamInfer();
  for (const id of ["1", "2", "3"]) stream.write(request({ id }));
  stream.end();
  const ids = [];
  for await (const { error_message, infer_response } of stream) {
    assert.equal(error_message, "");
    ids.push(infer_response.id);
  }
  assert.deepEqual(ids, ["1", "2", "3"]);
});

test("metadata of a call", async () => {
  const metadata = new grpc.Metadata();
  metadata.set("x-request-id", "mine");
  const received = await new Promise((resolve, reject) => {
    const each = client.ModelInfer(request(), metadata, (error) => error && reject(error));
    each.on("metadata", resolve);
  });
  assert.deepEqual(received.get("x-request-id"), ["mine"]);
});

for (const [name, change, code] of [
  ["unknown model", { model_name: "none" }, grpc.status.NOT_FOUND],
  ["missing input", { inputs: request().inputs.slice(0, 1), raw_input_contents: request().raw_input_contents.slice(0, 1) }, grpc.status.INVALID_ARGUMENT],
  ["wrong size", { raw_input_contents: [Buffer.alloc(3), texts("a", "b")] }, grpc.status.INVALID_ARGUMENT],
])
  test(`error: ${name}`, async () => {
    await assert.rejects(call("ModelInfer", request(change)), (error) => error.code === code);
  });

test("a message that is too large", async () => {
  const inputs = [{ name: "x", datatype: "FP32", shape: [1 << 18, 2] }, request().inputs[1]];
  await assert.rejects(
    call("ModelInfer", request({ inputs, raw_input_contents: [Buffer.alloc(1 << 21), texts("a", "b")] })),
    (error) => error.code === grpc.status.RESOURCE_EXHAUSTED,
  );
});

test("deadline and cancel", async () => {
  const deadline = Date.now() - 1000;
  await assert.rejects(call("ModelInfer", request(), { deadline }), (error) => error.code === grpc.status.DEADLINE_EXCEEDED);
  await assert.rejects(
    new Promise((_, reject) => client.ModelInfer(request(), (error) => reject(error ?? new Error("not cancelled"))).cancel()),
    (error) => error.code === grpc.status.CANCELLED,
  );
});

test("compression", async () => {
  const gzip = new inference.GRPCInferenceService(address, grpc.credentials.createInsecure(), {
    "grpc.default_compression_algorithm": grpc.compressionAlgorithms.gzip,
  });
  const response = await promisify(gzip.ModelInfer).call(gzip, request());
  assert.deepEqual(numbers(response.raw_output_contents[0]), [3, -4, 0, 6]);
  gzip.close();
});

test("repository and statistics", async () => {
  const { model_stats } = await call("ModelStatistics", { name: "Doubler" });
  assert.equal(model_stats[0].name, "Doubler");
});

test.after(() => client.close());
