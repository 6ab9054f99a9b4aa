// ai (Vercel AI SDK): five providers, each with texts, streams, tools and objects.

import assert from "node:assert/strict";
import test from "node:test";
import { createAnthropic } from "@ai-sdk/anthropic";
import { createOpenAI } from "@ai-sdk/openai";
import { createOpenAICompatible } from "@ai-sdk/openai-compatible";
import * as ai from "ai";
import { createOllama } from "ollama-ai-provider-v2";
import { z } from "zod";
import { CALL, collect, KEY, keyed, url } from "./addresses.mjs";

globalThis.AI_SDK_LOG_WARNINGS = false;
const { embedMany, generateText, streamText, tool } = ai;
const openai = createOpenAI({ baseURL: `${url}/v1`, apiKey: "-" });
const compatible = createOpenAICompatible({ name: "dragoman", baseURL: `${url}/v1`, supportsStructuredOutputs: true });
const anthropic = createAnthropic({ baseURL: `${url}/v1`, apiKey: "-" });
const ollama = createOllama({ baseURL: `${url}/api` });
const PROVIDERS = {
  "openai chat": (name) => openai.chat(name),
  "openai responses": (name) => openai.responses(name),
  "openai-compatible": (name) => compatible.chatModel(name),
  anthropic: (name) => anthropic(name),
  ollama: (name) => ollama(name),
};
const common = { maxRetries: 0 };
const weather = tool({
  description: "the weather of a city",
  inputSchema: z.object({ city: z.string() }),
  execute: async ({ city }) => `sun in ${city}`,
});
const Color = z.object({ name: z.enum(["red", "blue"]), amount: z.union([z.literal(1), z.literal(2)]) });

for (const [name, provider] of Object.entries(PROVIDERS)) {
  test(`${name}: text`, async () => {
    const result = await generateText({ ...common, model: provider("Scripted"), prompt: "say good day to you", system: "be brief" });
    assert.equal(result.text, "good day to you");
    assert.equal(result.finishReason, "stop");
    assert.equal(result.usage.outputTokens, 4);
  });

  // The provider of Ollama sends a field that Ollama does not have.
  test(`${name}: cut`, { skip: name === "ollama" }, async () => {
    const result = await generateText({ ...common, model: provider("Scripted"), prompt: "say a b c", maxOutputTokens: 2 });
    assert.deepEqual([result.text, result.finishReason], ["a b", "length"]);
  });

  test(`${name}: history`, async () => {
    const messages = [
      { role: "user", content: "say a" },
      { role: "assistant", content: "a" },
      { role: "user", content: [{ type: "text", text: "say b" }] },
    ];
    assert.equal((await generateText({ ...common, model: provider("Scripted"), messages })).text, "b");
  });

  test(`${name}: stream`, async () => {
    const result = streamText({ ...common, model: provider("Scripted"), prompt: "say good day" });
    assert.equal((await collect(result.textStream)).join(""), "good day");
    assert.equal(await result.finishReason, "stop");
  });

  test(`${name}: tools in steps`, async () => {
    const stopWhen = ai.stepCountIs ? ai.stepCountIs(3) : ai.isStepCount(3);
    const result = await generateText({ ...common, model: provider("Scripted"), prompt: CALL, tools: { weather }, stopWhen });
    assert.equal(result.text, "the result is sun in Oslo");
    assert.deepEqual(result.steps[0].toolCalls.map((call) => [call.toolName, call.input]), [["weather", { city: "Oslo" }]]);
  });

  test(`${name}: tools in a stream`, async () => {
    const stopWhen = ai.stepCountIs ? ai.stepCountIs(3) : ai.isStepCount(3);
    const result = streamText({ ...common, model: provider("Scripted"), prompt: CALL, tools: { weather }, stopWhen });
    assert.equal((await collect(result.textStream)).join(""), "the result is sun in Oslo");
  });

  test(`${name}: object`, async () => {
    const result = await generateText({
      ...common,
      model: provider("tiny-llama"),
      prompt: "a color",
      maxOutputTokens: 100,
      output: ai.Output.object({ schema: Color }),
    });
    assert.ok(Color.safeParse(result.output ?? result.experimental_output).success);
  });

  test(`${name}: unknown model`, async () => {
    await assert.rejects(generateText({ ...common, model: provider("none"), prompt: "a" }), (error) => {
      assert.equal(error.statusCode, 404);
      return true;
    });
  });

  test(`${name}: abort`, async () => {
    const abortSignal = AbortSignal.timeout(500);
    await assert.rejects(generateText({ ...common, model: provider("Scripted"), prompt: "wait", abortSignal }));
  });
}

const EMBEDDERS = {
  openai: openai.textEmbeddingModel ?? openai.embedding,
  "openai-compatible": compatible.textEmbeddingModel ?? compatible.embeddingModel,
  ollama: ollama.textEmbeddingModel ?? ollama.embedding,
};
for (const [name, embedder] of Object.entries(EMBEDDERS))
  test(`${name}: embeddings`, async () => {
    const { embeddings } = await embedMany({ ...common, model: embedder("Angles"), values: ["0", "60"] });
    assert.ok(Math.abs(embeddings[1][0] - 0.5) < 1e-6);
  });

test("a key", async () => {
  const good = createOpenAI({ baseURL: `${keyed}/v1`, apiKey: KEY });
  assert.equal((await generateText({ ...common, model: good.chat("Scripted"), prompt: "say a" })).text, "a");
  const wrong = createOpenAI({ baseURL: `${keyed}/v1`, apiKey: "wrong" });
  await assert.rejects(generateText({ ...common, model: wrong.chat("Scripted"), prompt: "a" }), (error) => error.statusCode === 401);
});
