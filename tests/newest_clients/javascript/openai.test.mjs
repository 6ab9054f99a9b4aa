// openai: chats, completions, Responses, embeddings, models and errors.

import assert from "node:assert/strict";
import test from "node:test";
import OpenAI from "openai";
import { zodResponseFormat, zodTextFormat } from "openai/helpers/zod";
import { z } from "zod";
import { CALL, collect, KEY, keyed, url, user } from "./addresses.mjs";

const client = new OpenAI({ baseURL: `${url}/v1`, apiKey: "-", maxRetries: 0 });
const chat = (content, more = {}) =>
  client.chat.completions.create({ model: "Scripted", messages: user(content), ...more });
const parameters = { type: "object", properties: { city: { type: "string" } }, required: ["city"] };
const WEATHER = { type: "function", function: { name: "weather", parameters } };
const FLAT = { type: "function", name: "weather", parameters, strict: false };
const Color = z.object({ name: z.enum(["red", "blue"]), amount: z.union([z.literal(1), z.literal(2)]) });

test("chat", async () => {
  const response = await chat("say good day to you");
  assert.equal(response.choices[0].message.content, "good day to you");
  assert.equal(response.choices[0].finish_reason, "stop");
  assert.deepEqual([response.usage.prompt_tokens, response.usage.completion_tokens], [5, 4]);
  assert.ok(response._request_id);
});

for (const name of ["max_tokens", "max_completion_tokens"])
  test(`chat is cut by ${name}`, async () => {
    const { choices } = await chat("say a b c", { [name]: 2 });
    assert.deepEqual([choices[0].message.content, choices[0].finish_reason], ["a b", "length"]);
  });

for (const role of ["system", "developer"])
  test(`role ${role}`, async () => {
    const messages = [{ role, content: "be brief" }, ...user("say a"), { role: "assistant", content: "a" }];
    const { choices } = await chat("", { messages: [...messages, ...user("say b")] });
    assert.equal(choices[0].message.content, "b");
  });

test("chat stream", async () => {
  const chunks = await collect(await chat("say good day", { stream: true, stream_options: { include_usage: true } }));
  assert.equal(chunks.map((chunk) => chunk.choices[0]?.delta.content ?? "").join(""), "good day");
  assert.equal(chunks.at(-1).usage.completion_tokens, 2);
});

test("chat stream helper", async () => {
  const stream = client.chat.completions.stream({ model: "Scripted", messages: user("say good day") });
  const deltas = [];
  stream.on("content", (delta) => deltas.push(delta));
  assert.equal(await stream.finalContent(), "good day");
  assert.equal(deltas.join(""), "good day");
});

test("choices, seed and logprobs", async () => {
  const create = () => chat("the cat", { model: "tiny-llama", n: 2, seed: 1, logprobs: true, top_logprobs: 2, max_tokens: 4 });
  const [first, again] = [await create(), await create()];
  assert.deepEqual(first.choices.map((c) => c.message.content), again.choices.map((c) => c.message.content));
  assert.equal(first.choices.length, 2);
  for (const token of first.choices[0].logprobs.content) {
    assert.ok(token.logprob <= 0);
    assert.equal(token.top_logprobs.length, 2);
  }
});

test("parse", async () => {
  const response = await client.chat.completions.parse({
    model: "tiny-llama",
    messages: user("a color"),
    response_format: zodResponseFormat(Color, "color"),
  });
  assert.ok(Color.safeParse(response.choices[0].message.parsed).success);
});

test("tools", async () => {
  const { choices } = await chat(CALL, { tools: [WEATHER] });
  const [call] = choices[0].message.tool_calls;
  assert.deepEqual([call.function.name, JSON.parse(call.function.arguments)], ["weather", { city: "Oslo" }]);
  assert.equal(choices[0].finish_reason, "tool_calls");
  const result = { role: "tool", tool_call_id: call.id, content: "sun" };
  const after = await chat("", { messages: [...user(CALL), choices[0].message, result], tools: [WEATHER] });
  assert.equal(after.choices[0].message.content, "the result is sun");
});

test("tools in a stream", async () => {
  const stream = client.chat.completions.stream({ model: "Scripted", messages: user(CALL), tools: [WEATHER] });
  const { choices } = await stream.finalChatCompletion();
  assert.deepEqual(JSON.parse(choices[0].message.tool_calls[0].function.arguments), { city: "Oslo" });
});

for (const [name, tool_choice] of Object.entries({ required: "required", named: { type: "function", function: { name: "weather" } } }))
  test(`tool choice ${name}`, async () => {
    const { choices } = await chat("a", { model: "tiny-llama", tools: [WEATHER], tool_choice, max_tokens: 200 });
    assert.equal(choices[0].message.tool_calls[0].function.name, "weather");
  });

test("the tool loop", async () => {
  const tool = {
    type: "function",
    function: { name: "weather", parameters, parse: JSON.parse, function: ({ city }) => `sun in ${city}` },
  };
  const runner = client.chat.completions.runTools({ model: "Scripted", messages: user(CALL), tools: [tool] });
  assert.equal(await runner.finalContent(), "the result is sun in Oslo");
});

test("custom tools", async () => {
  const { choices } = await chat('call run {"input": "1 + 1"}', { tools: [{ type: "custom", custom: { name: "run" } }] });
  const [call] = choices[0].message.tool_calls;
  assert.deepEqual([call.type, call.custom], ["custom", { name: "run", input: "1 + 1" }]);
});

test("reasoning", async () => {
  const { choices } = await chat("say <think>so it is</think> yes", { reasoning_effort: "low" });
  assert.equal(choices[0].message.reasoning_content, "so it is");
});

test("ignored parameters are named", async () => {
  const { data, response } = await chat("say a", { verbosity: "low", store: true }).withResponse();
  assert.equal(data.choices[0].message.content, "a");
  assert.equal(response.headers.get("x-ignored-parameters"), "verbosity, store");
});

test("completions", async () => {
  const response = await client.completions.create({ model: "Scripted", prompt: ["say a b", "say c"] });
  assert.deepEqual(response.choices.map((choice) => choice.text), ["a b", "c"]);
  const chunks = await collect(await client.completions.create({ model: "Scripted", prompt: "say a b", stream: true }));
  assert.equal(chunks.map((chunk) => chunk.choices[0].text).join(""), "a b");
});

test("responses", async () => {
  const response = await client.responses.create({ model: "Scripted", input: "say good day", instructions: "be brief" });
  assert.deepEqual([response.output_text, response.status], ["good day", "completed"]);
  const cut = await client.responses.create({ model: "Scripted", input: "say a b c", max_output_tokens: 2 });
  assert.deepEqual([cut.status, cut.incomplete_details.reason], ["incomplete", "max_output_tokens"]);
});

test("stored responses", async () => {
  const first = await client.responses.create({ model: "Scripted", input: "say a" });
  const second = await client.responses.create({ model: "Scripted", input: "say b", previous_response_id: first.id });
  assert.equal((await client.responses.retrieve(second.id)).output_text, "b");
  assert.equal((await collect(client.responses.inputItems.list(second.id))).length, 3);
  await client.responses.delete(first.id);
  await assert.rejects(client.responses.retrieve(first.id), OpenAI.NotFoundError);
});

test("input tokens", async () => {
  const count = await client.responses.inputTokens.count({ model: "Scripted", input: "say good day" });
  assert.deepEqual([count.object, count.input_tokens], ["response.input_tokens", 3]);
});

test("response stream", async () => {
  const stream = client.responses.stream({ model: "Scripted", input: "say good day" });
  const events = await collect(stream);
  assert.deepEqual([events[0].type, events.at(-1).type], ["response.created", "response.completed"]);
  assert.deepEqual(events.map((event) => event.sequence_number), events.map((_, i) => i));
  assert.equal((await stream.finalResponse()).output_text, "good day");
});

for (const type of ["function", "custom"])
  test(`response with a ${type} tool`, async () => {
    const tool = type === "function" ? FLAT : { type, name: "weather" };
    const input = type === "function" ? CALL : 'call weather {"input": "Oslo"}';
    const first = await client.responses.create({ model: "Scripted", input, tools: [tool] });
    const [call] = first.output;
    if (type === "function") assert.deepEqual(JSON.parse(call.arguments), { city: "Oslo" });
    else assert.equal(call.input, "Oslo");
    const result = { type: `${call.type}_output`, call_id: call.call_id, output: "sun" };
    const after = await client.responses.create({ model: "Scripted", input: [result], tools: [tool], previous_response_id: first.id });
    assert.equal(after.output_text, "the result is sun");
  });

test("response parse", async () => {
  const response = await client.responses.parse({ model: "tiny-llama", input: "a color", text: { format: zodTextFormat(Color, "color") } });
  assert.ok(Color.safeParse(response.output_parsed).success);
});

test("response reasoning", async () => {
  const response = await client.responses.create({ model: "Scripted", input: "say <think>so</think> yes", reasoning: { effort: "low" } });
  assert.deepEqual(response.output.map((item) => item.type), ["reasoning", "message"]);
});

for (const encoding_format of [undefined, "float"])
  test(`embeddings ${encoding_format}`, async () => {
    const { data } = await client.embeddings.create({ model: "Angles", input: ["0", "60"], encoding_format });
    assert.ok(Math.abs(data[1].embedding[0] - 0.5) < 1e-6);
  });

test("models", async () => {
  const names = (await collect(client.models.list())).map((model) => model.id);
  assert.ok(names.includes("Scripted") && names.includes("tiny-llama"));
  assert.equal((await client.models.retrieve("Scripted")).object, "model");
});

const WRONG = {
  temperature: { temperature: 9 },
  messages: { messages: [] },
  modalities: { modalities: ["text", "audio"] },
  web_search_options: { web_search_options: {} },
  moderation: { moderation: { model: "omni" } },
};
for (const [param, change] of Object.entries(WRONG))
  test(`invalid ${param}`, async () => {
    await assert.rejects(chat("a", change), (error) => {
      assert.ok(error instanceof OpenAI.BadRequestError);
      assert.deepEqual([error.param, error.type], [param, "invalid_request_error"]);
      return true;
    });
  });

for (const [path, meant] of [["", "/v1/chat/completions"], ["/v1/v1/", "/v1/chat/completions"]])
  test(`address ${path || "without /v1"}`, async () => {
    const other = new OpenAI({ baseURL: url + path, apiKey: "-", maxRetries: 0 });
    await assert.rejects(other.chat.completions.create({ model: "Scripted", messages: user("a") }), (error) => {
      assert.equal(error.status, 404);
      assert.match(error.message, new RegExp(`did you mean ${meant}`));
      return true;
    });
  });

test("unknown model", async () => {
  await assert.rejects(chat("a", { model: "none" }), (error) => error.code === "model_not_found" && error.status === 404);
});

test("keys", async () => {
  const good = new OpenAI({ baseURL: `${keyed}/v1`, apiKey: KEY, maxRetries: 0 });
  assert.equal((await good.chat.completions.create({ model: "Scripted", messages: user("say a") })).choices[0].message.content, "a");
  const wrong = new OpenAI({ baseURL: `${keyed}/v1`, apiKey: "wrong", maxRetries: 0 });
  await assert.rejects(wrong.models.list(), OpenAI.AuthenticationError);
});

test("too large", async () => {
  await assert.rejects(chat("a".repeat(2 << 20)), (error) => error.status === 413);
});

test("timeouts and aborts", async () => {
  const body = { model: "Scripted", messages: user("wait") };
  await assert.rejects(client.chat.completions.create(body, { timeout: 500 }), OpenAI.APIConnectionTimeoutError);
  const stream = await chat("say a b c d e f", { stream: true });
  for await (const _ of stream) break;
  assert.equal((await chat("say a")).choices[0].message.content, "a");
});

test("concurrent calls", async () => {
  const found = await Promise.all([...Array(8).keys()].map((i) => chat(`say ${i}`)));
  assert.deepEqual(found.map((each) => each.choices[0].message.content), [...Array(8).keys()].map(String));
});
