// ollama: chats, completions, embeddings, models and errors.

import assert from "node:assert/strict";
import test from "node:test";
import { Ollama } from "ollama";
import { CALL, collect, KEY, keyed, url, user } from "./addresses.mjs";

const client = new Ollama({ host: url });
const chat = (content, more = {}) => client.chat({ model: "Scripted", messages: user(content), ...more });
const WEATHER = {
  type: "function",
  function: { name: "weather", parameters: { type: "object", properties: { city: { type: "string" } } } },
};

test("chat", async () => {
  const response = await chat("say good day to you");
  assert.equal(response.message.content, "good day to you");
  assert.deepEqual([response.done, response.done_reason, response.prompt_eval_count, response.eval_count], [true, "stop", 5, 4]);
});

for (const model of ["Scripted", "Scripted:latest"])
  test(`chat stream of ${model}`, async () => {
    const chunks = await collect(await chat("say good day", { model, stream: true }));
    assert.equal(chunks.map((chunk) => chunk.message.content).join(""), "good day");
    assert.ok(chunks.at(-1).done);
  });

test("options", async () => {
  const cut = await chat("say a b c", { options: { num_predict: 2, num_ctx: 4096 } });
  assert.deepEqual([cut.message.content, cut.done_reason], ["a b", "length"]);
  const options = { temperature: 0, num_predict: 6 };
  const [first, again] = [await chat("the cat", { model: "tiny-llama", options }), await chat("the cat", { model: "tiny-llama", options })];
  assert.equal(first.message.content, again.message.content);
});

for (const stream of [false, true])
  test(`durations of a ${stream ? "stream" : "whole response"} add up`, async () => {
    const found = await chat("the", { model: "tiny-llama", options: { num_predict: 6 }, stream });
    const last = stream ? (await collect(found)).at(-1) : found;
    const sum = last.load_duration + last.prompt_eval_duration + last.eval_duration;
    assert.ok(Math.abs(sum - last.total_duration) <= 3);
  });

test("thinking", async () => {
  const response = await chat("say <think>so it is</think> yes", { think: true });
  assert.deepEqual([response.message.thinking, response.message.content.trim()], ["so it is", "yes"]);
});

for (const stream of [false, true])
  test(`tools ${stream ? "in a stream" : "whole"}`, async () => {
    const found = await chat(CALL, { tools: [WEATHER], stream });
    const parts = stream ? await collect(found) : [found];
    const { message } = parts.find((part) => part.message.tool_calls);
    assert.deepEqual(message.tool_calls[0].function.arguments, { city: "Oslo" });
    const messages = [...user(CALL), message, { role: "tool", tool_name: "weather", content: "sun" }];
    assert.equal((await chat("", { messages, tools: [WEATHER] })).message.content, "the result is sun");
  });

test("format", async () => {
  const format = { type: "object", properties: { a: { enum: [1, 2] } }, required: ["a"], additionalProperties: false };
  const response = await chat("a", { model: "tiny-llama", format, options: { num_predict: 60 } });
  assert.ok([1, 2].includes(JSON.parse(response.message.content).a));
});

test("generate", async () => {
  const response = await client.generate({ model: "Scripted", prompt: "say good day", system: "be brief" });
  assert.deepEqual([response.response, response.done_reason], ["good day", "stop"]);
  const chunks = await collect(await client.generate({ model: "Scripted", prompt: "say a b", stream: true }));
  assert.equal(chunks.map((chunk) => chunk.response).join(""), "a b");
});

test("embeddings", async () => {
  const { embeddings } = await client.embed({ model: "Angles", input: ["0", "60"] });
  assert.ok(Math.abs(embeddings[1][0] - 0.5) < 1e-6);
  assert.equal((await client.embeddings({ model: "Angles", prompt: "0" })).embedding.length, 2);
});

test("models", async () => {
  const { models } = await client.list();
  const tiny = models.find((model) => model.name === "tiny-llama:latest");
  assert.ok(tiny.size > 1000);
  assert.equal(tiny.details.format, "safetensors");
  assert.match(tiny.details.parameter_size, /^\d+(\.\d+)?[KM]$/);
  assert.ok((await client.ps()).models.some((model) => model.name === "Scripted:latest"));
  const shown = await client.show({ model: "tiny-llama" });
  assert.ok(shown.capabilities.includes("completion"));
  assert.ok(shown.model_info["general.parameter_count"] > 1000);
  assert.match((await client.version()).version, /^\d+\.\d+\.\d+$/);
});

test("pull", async () => {
  assert.equal((await client.pull({ model: "Scripted" })).status, "success");
  const states = await collect(await client.pull({ model: "Scripted", stream: true }));
  assert.deepEqual(states.map((each) => each.status), ["success"]);
  await assert.rejects(client.pull({ model: "none" }), /downloads no models/);
});

const WRONG = {
  "unknown model": [{ model: "none" }, 404],
  temperature: [{ options: { temperature: -1 } }, 400],
  format: [{ model: "tiny-llama", format: { type: "nothing" } }, 400],
};
for (const [name, [change, status]] of Object.entries(WRONG))
  test(`error: ${name}`, async () => {
    await assert.rejects(chat("a", change), (error) => error.status_code === status);
  });

test("unsupported parameters", async () => {
  for (const [name, value] of Object.entries({ context: [1], template: "x" }))
    await assert.rejects(client.generate({ model: "Scripted", prompt: "a", [name]: value }), new RegExp(`\`${name}\``));
});

test("keys", async () => {
  const good = new Ollama({ host: keyed, headers: { Authorization: `Bearer ${KEY}` } });
  assert.equal((await good.chat({ model: "Scripted", messages: user("say a") })).message.content, "a");
  const wrong = new Ollama({ host: keyed });
  await assert.rejects(wrong.chat({ model: "Scripted", messages: user("a") }), (error) => error.status_code === 401);
});

test("aborts", async () => {
  const stream = await chat("say a b c d e f", { stream: true });
  setTimeout(() => stream.abort(), 0);
  await collect(stream).catch((error) => assert.equal(error.name, "AbortError"));
  assert.equal((await chat("say a")).message.content, "a");
});
