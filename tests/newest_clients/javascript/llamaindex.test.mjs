// LlamaIndex.TS: its packages for OpenAI and Ollama.

import assert from "node:assert/strict";
import test from "node:test";
import { Ollama, OllamaEmbedding } from "@llamaindex/ollama";
import { OpenAI, OpenAIEmbedding } from "@llamaindex/openai";
import { tool } from "llamaindex";
import { z } from "zod";
import { CALL, collect, url, user } from "./addresses.mjs";

const MODELS = {
  openai: (model) => new OpenAI({ model, apiKey: "-", baseURL: `${url}/v1`, maxRetries: 0, supportToolCall: true, maxTokens: 100 }),
  ollama: (model) => new Ollama({ model, config: { host: url } }),
};
const weather = tool({
  name: "weather",
  description: "the weather of a city",
  parameters: z.object({ city: z.string() }),
  execute: ({ city }) => `sun in ${city}`,
});

for (const [name, make] of Object.entries(MODELS)) {
  test(`${name}: chat`, async () => {
    const response = await make("Scripted").chat({ messages: user("say good day") });
    assert.equal(response.message.content, "good day");
  });

  test(`${name}: stream`, async () => {
    const chunks = await collect(await make("Scripted").chat({ messages: user("say good day"), stream: true }));
    assert.equal(chunks.map((chunk) => chunk.delta).join(""), "good day");
  });

  test(`${name}: complete`, async () => {
    assert.equal((await make("Scripted").complete({ prompt: "say a b" })).text, "a b");
  });

  test(`${name}: tools`, async () => {
    const response = await make("Scripted").chat({ messages: user(CALL), tools: [weather] });
    const [call] = response.message.options.toolCall;
    const input = typeof call.input === "string" ? JSON.parse(call.input) : call.input;
    assert.deepEqual([call.name, input], ["weather", { city: "Oslo" }]);
  });

  test(`${name}: unknown model`, async () => {
    await assert.rejects(make("none").chat({ messages: user("a") }), /none/);
  });
}

test("embeddings", async () => {
  const embedders = [
    new OpenAIEmbedding({ model: "Angles", apiKey: "-", baseURL: `${url}/v1` }),
    new OllamaEmbedding({ model: "Angles", config: { host: url } }),
  ];
  for (const embedder of embedders) assert.ok(Math.abs((await embedder.getTextEmbedding("60"))[0] - 0.5) < 1e-6);
});
