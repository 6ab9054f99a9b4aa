// @anthropic-ai/sdk: messages, streams, tools and their loops, threads, counts, models and errors.

import assert from "node:assert/strict";
import test from "node:test";
import Anthropic from "@anthropic-ai/sdk";
import { betaZodTool } from "@anthropic-ai/sdk/helpers/beta/zod";
import { z } from "zod";
import { CALL, collect, KEY, keyed, url, user } from "./addresses.mjs";

const client = new Anthropic({ baseURL: url, apiKey: "-", maxRetries: 0 });
const create = (content, more = {}) =>
  client.messages.create({ model: "Scripted", max_tokens: 50, messages: user(content), ...more });
const WEATHER = {
  name: "weather",
  input_schema: { type: "object", properties: { city: { type: "string" } }, required: ["city"] },
};
const weather = betaZodTool({
  name: "weather",
  description: "the weather of a city",
  inputSchema: z.object({ city: z.string() }),
  run: ({ city }) => `sun in ${city}`,
});

test("message", async () => {
  const message = await create("say good day to you");
  assert.deepEqual(message.content, [{ type: "text", text: "good day to you" }]);
  assert.deepEqual([message.stop_reason, message.usage.input_tokens, message.usage.output_tokens], ["end_turn", 5, 4]);
  assert.ok(message._request_id);
});

test("message is cut", async () => {
  const message = await create("say a b c", { max_tokens: 2 });
  assert.deepEqual([message.content[0].text, message.stop_reason], ["a b", "max_tokens"]);
});

test("system and blocks", async () => {
  for (const system of ["be brief", [{ type: "text", text: "be brief", cache_control: { type: "ephemeral" } }]])
    assert.equal((await create("say a", { system })).content[0].text, "a");
  assert.equal((await create([{ type: "text", text: "say b" }])).content[0].text, "b");
});

test("stream", async () => {
  const stream = client.messages.stream({ model: "Scripted", max_tokens: 50, messages: user("say good day") });
  const texts = [];
  stream.on("text", (text) => texts.push(text));
  assert.equal(await stream.finalText(), "good day");
  assert.equal(texts.join(""), "good day");
  const kinds = (await collect(await create("say a", { stream: true }))).map((event) => event.type);
  assert.deepEqual([kinds[0], kinds.at(-1)], ["message_start", "message_stop"]);
});

test("thinking", async () => {
  const message = await create("say <think>so it is</think> yes", { thinking: { type: "adaptive" } });
  assert.deepEqual(message.content.map((block) => block.type), ["thinking", "text"]);
  const history = [...user("x"), { role: "assistant", content: message.content }, ...user("say a")];
  assert.equal((await create("", { messages: history })).content[0].text, "a");
});

for (const stream of [false, true])
  test(`tools ${stream ? "in a stream" : "whole"}`, async () => {
    const body = { model: "Scripted", max_tokens: 50, messages: user(CALL), tools: [WEATHER] };
    const message = stream ? await client.messages.stream(body).finalMessage() : await client.messages.create(body);
    const [use] = message.content;
    assert.deepEqual([use.name, use.input, message.stop_reason], ["weather", { city: "Oslo" }, "tool_use"]);
    const result = { type: "tool_result", tool_use_id: use.id, content: "sun" };
    const messages = [...user(CALL), { role: "assistant", content: message.content }, ...user([result])];
    assert.equal((await create("", { messages, tools: [WEATHER] })).content[0].text, "the result is sun");
  });

for (const tool_choice of [{ type: "any" }, { type: "tool", name: "weather" }])
  test(`tool choice ${tool_choice.type}`, async () => {
    const message = await create("a", { model: "tiny-llama", max_tokens: 200, tools: [WEATHER], tool_choice });
    assert.deepEqual([message.content[0].type, message.content[0].name], ["tool_use", "weather"]);
  });

for (const more of [{}, { thread: false }, { stream: true }])
  test(`the tool loop ${JSON.stringify(more)}`, async () => {
    const runner = client.beta.messages.toolRunner({ model: "Scripted", max_tokens: 50, messages: user(CALL), tools: [weather], ...more });
    const reasons = [];
    for await (const reply of runner) reasons.push((more.stream ? await reply.finalMessage() : reply).stop_reason);
    assert.deepEqual(reasons, ["tool_use", "end_turn"]);
    assert.equal((await runner.done()).content[0].text, "the result is sun in Oslo");
  });

test("threads", async () => {
  const thread = client.beta.messages.thread({ model: "Scripted", max_tokens: 50 });
  const first = await thread.send(user("say a b")[0]);
  const second = await thread.send(user("say c")[0]);
  assert.deepEqual([first.content[0].text, second.content[0].text], ["a b", "c"]);
  assert.ok(second.usage.input_tokens > first.usage.input_tokens + 2);
});

test("structured output", async () => {
  const schema = { type: "object", properties: { a: { enum: [1, 2] } }, required: ["a"], additionalProperties: false };
  const message = await create("a", { model: "tiny-llama", max_tokens: 100, output_config: { format: { type: "json_schema", schema } } });
  assert.ok([1, 2].includes(JSON.parse(message.content[0].text).a));
});

test("count tokens", async () => {
  assert.equal((await client.messages.countTokens({ model: "Scripted", messages: user("say good day") })).input_tokens, 3);
  assert.equal((await client.beta.messages.countTokens({ model: "Scripted", messages: user("a b") })).input_tokens, 2);
});

test("models", async () => {
  const models = await collect(client.models.list());
  const one = models.find((model) => model.id === "Scripted");
  assert.deepEqual([one.type, one.display_name], ["model", "Scripted"]);
  assert.ok(Date.parse(one.created_at) > 0);
  assert.deepEqual((await collect(client.models.list({ limit: 1 }))).map((model) => model.id), models.map((model) => model.id));
  assert.equal((await client.models.retrieve("Scripted")).id, "Scripted");
  await assert.rejects(client.models.retrieve("none"), Anthropic.NotFoundError);
});

const WRONG = {
  messages: { messages: [] },
  max_tokens: { max_tokens: 0 },
  container: { container: "container_1" },
  mcp_servers: { mcp_servers: [{ type: "url", name: "a", url: "https://a" }] },
  "server tool": { tools: [{ type: "web_search_20250305", name: "web_search" }] },
  document: { messages: user([{ type: "document", source: { type: "text", media_type: "text/plain", data: "a" } }]) },
};
for (const [name, change] of Object.entries(WRONG))
  test(`invalid ${name}`, async () => {
    await assert.rejects(create("a", change), (error) => {
      assert.ok(error instanceof Anthropic.BadRequestError);
      assert.equal(error.error.error.type, "invalid_request_error");
      assert.equal(error.error.request_id, error.requestID);
      return true;
    });
  });

test("unknown model and path", async () => {
  await assert.rejects(create("a", { model: "none" }), Anthropic.NotFoundError);
  const other = new Anthropic({ baseURL: `${url}/v1`, apiKey: "-", maxRetries: 0 });
  const body = { model: "Scripted", max_tokens: 9, messages: user("a") };
  await assert.rejects(other.messages.create(body), /did you mean \/v1\/messages/);
});

test("keys, and the id of a request that is rejected", async () => {
  const good = new Anthropic({ baseURL: keyed, apiKey: KEY, maxRetries: 0, defaultHeaders: { "x-request-id": "of-a-good-caller" } });
  const body = { model: "Scripted", max_tokens: 9, messages: user("say a") };
  assert.equal((await good.messages.create(body)).content[0].text, "a");
  const wrong = new Anthropic({ baseURL: keyed, apiKey: "wrong", maxRetries: 0 });
  await assert.rejects(wrong.messages.create(body), (error) => {
    assert.ok(error instanceof Anthropic.AuthenticationError);
    assert.notEqual(error.requestID, "of-a-good-caller");
    assert.equal(error.requestID, error.error.request_id);
    return true;
  });
});

test("too large", async () => {
  await assert.rejects(create("a".repeat(2 << 20)), (error) => error.status === 413);
});

test("timeouts and aborts", async () => {
  const body = { model: "Scripted", max_tokens: 9, messages: user("wait") };
  await assert.rejects(client.messages.create(body, { timeout: 500 }), Anthropic.APIConnectionTimeoutError);
  const stream = client.messages.stream({ ...body, messages: user("say a b c d") });
  for await (const _ of stream) break;
  assert.equal((await create("say a")).content[0].text, "a");
});

test("concurrent calls", async () => {
  const found = await Promise.all([...Array(8).keys()].map((i) => create(`say ${i}`)));
  assert.deepEqual(found.map((each) => each.content[0].text), [...Array(8).keys()].map(String));
});
