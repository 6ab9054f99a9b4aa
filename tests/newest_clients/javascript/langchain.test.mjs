// LangChain.js: its packages for OpenAI, Anthropic and Ollama.

import assert from "node:assert/strict";
import test from "node:test";
import { ChatAnthropic } from "@langchain/anthropic";
import { HumanMessage, SystemMessage, ToolMessage } from "@langchain/core/messages";
import { tool } from "@langchain/core/tools";
import { ChatOllama, OllamaEmbeddings } from "@langchain/ollama";
import { ChatOpenAI, OpenAI, OpenAIEmbeddings } from "@langchain/openai";
import { createAgent } from "langchain";
import { z } from "zod";
import { CALL, collect, KEY, keyed, url } from "./addresses.mjs";

const openai = (model, more = {}) =>
  new ChatOpenAI({ model, apiKey: "-", maxRetries: 0, maxTokens: 100, configuration: { baseURL: `${url}/v1` }, ...more });
const MODELS = {
  openai: (model) => openai(model),
  "openai responses": (model) => openai(model, { useResponsesApi: true }),
  anthropic: (model) => new ChatAnthropic({ model, apiKey: "-", maxRetries: 0, maxTokens: 100, anthropicApiUrl: url }),
  ollama: (model) => new ChatOllama({ model, baseUrl: url, maxRetries: 0, numPredict: 100 }),
};
const weather = tool(({ city }) => `sun in ${city}`, {
  name: "weather",
  description: "the weather of a city",
  schema: z.object({ city: z.string() }),
});
const Color = z.object({ name: z.enum(["red", "blue"]), amount: z.union([z.literal(1), z.literal(2)]) });

for (const [name, make] of Object.entries(MODELS)) {
  test(`${name}: chat`, async () => {
    const response = await make("Scripted").invoke([new SystemMessage("be brief"), new HumanMessage("say good day to you")]);
    assert.equal(response.text, "good day to you");
    assert.equal(response.usage_metadata.output_tokens, 4);
  });

  test(`${name}: stream`, async () => {
    const chunks = await collect(await make("Scripted").stream("say good day"));
    assert.equal(chunks.map((chunk) => chunk.text).join(""), "good day");
  });

  test(`${name}: batch`, async () => {
    const responses = await make("Scripted").batch(["say a", "say b"]);
    assert.deepEqual(responses.map((response) => response.text), ["a", "b"]);
  });

  test(`${name}: tools`, async () => {
    const model = make("Scripted").bindTools([weather]);
    const question = new HumanMessage(CALL);
    const answer = await model.invoke([question]);
    const [call] = answer.tool_calls;
    assert.deepEqual([call.name, call.args], ["weather", { city: "Oslo" }]);
    const after = await model.invoke([question, answer, new ToolMessage({ content: "sun", tool_call_id: call.id })]);
    assert.equal(after.text, "the result is sun");
  });

  test(`${name}: tools in a stream`, async () => {
    const chunks = await collect(await make("Scripted").bindTools([weather]).stream(CALL));
    const whole = chunks.slice(1).reduce((sum, chunk) => sum.concat(chunk), chunks[0]);
    assert.deepEqual(whole.tool_calls.map((call) => call.args), [{ city: "Oslo" }]);
  });

  test(`${name}: an agent`, async () => {
    const agent = createAgent({ model: make("Scripted"), tools: [weather] });
    const { messages } = await agent.invoke({ messages: [new HumanMessage(CALL)] });
    assert.equal(messages.at(-1).text, "the result is sun in Oslo");
  });

  test(`${name}: unknown model`, async () => {
    await assert.rejects(make("none").invoke("a"), /none/);
  });
}

for (const [name, method] of [["openai", "jsonSchema"], ["openai responses", "jsonSchema"], ["ollama", "jsonSchema"]])
  test(`${name}: structured output`, async () => {
    const color = await MODELS[name]("tiny-llama").withStructuredOutput(Color, { method }).invoke("a color");
    assert.ok(Color.safeParse(color).success);
  });

test("completions", async () => {
  const model = new OpenAI({ model: "Scripted", apiKey: "-", maxRetries: 0, configuration: { baseURL: `${url}/v1` } });
  assert.equal(await model.invoke("say a b"), "a b");
});

test("embeddings", async () => {
  const embedders = [
    new OpenAIEmbeddings({ model: "Angles", apiKey: "-", configuration: { baseURL: `${url}/v1` } }),
    new OllamaEmbeddings({ model: "Angles", baseUrl: url }),
  ];
  for (const embedder of embedders) {
    const vectors = await embedder.embedDocuments(["0", "60"]);
    assert.ok(Math.abs(vectors[1][0] - 0.5) < 1e-6);
  }
});

test("keys", async () => {
  const at = (apiKey) => openai("Scripted", { apiKey, configuration: { baseURL: `${keyed}/v1` } });
  assert.equal((await at(KEY).invoke("say a")).text, "a");
  await assert.rejects(at("wrong").invoke("a"), (error) => error.status === 401);
});
